"""Every place that reads sampling parameters takes the numbers of one table, SGLang's own."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
import pytest

from shell_router.api.bodies import NATIVE_NAMES, read_sampling
from shell_router.api.fields import CHAT
from shell_router.core.sampling import RANGES, Range, check_sampling
from shell_router.engines.native_body import read_native
from shell_router.errors import InvalidRequest
from shell_router.files.read import check
from shell_router.standins.embedded.wire import parse_sampling_params
from shell_router.topology.keys import SAMPLING

Reader = Callable[[Mapping[str, Any]], object]


def read_natively(params: Mapping[str, Any]) -> None:
    read_native(orjson.dumps({"text": "x", "sampling_params": params}), "fresh")


def read_as_openai(params: Mapping[str, Any]) -> None:
    names = {native: name for name, native in NATIVE_NAMES.items()}
    fields = {names.get(name, name): value for name, value in params.items()}
    read_sampling(CHAT.read({"messages": [{"role": "user", "content": "x"}], **fields}))


def read_topology(params: Mapping[str, Any]) -> None:
    _, problems = check(SAMPLING, params)
    if problems:
        raise InvalidRequest(problems[0].message)


PLACES: Mapping[str, Reader] = {
    "fields of the API": read_as_openai,
    "topology files": read_topology,
    "agents' requests": check_sampling,
    "native bodies": read_natively,
    "embedded engine": lambda params: parse_sampling_params(params, 50),
}


def numbers(limits: Range) -> Iterator[float]:
    """Yield numbers at, inside and beyond both ends, and the one that is left out."""
    step = 1 if limits.whole else 1e-3
    for end in (limits.low, limits.high):
        yield from (end, end - step, end + step)
    yield from (0, 1, -1, 0.5, 2.5)
    if not limits.whole:
        yield math.nextafter(limits.low, -math.inf)


CASES = [
    (name, number)
    for name, limits in RANGES.items()
    for number in dict.fromkeys(numbers(limits))
    if abs(number) < 2**63 + 1
]


OTHERWISE = {
    ("top_p", 0),  # OpenAI's range has it
    ("max_new_tokens", 0),  # an answer has a token; SGLang prefills alone for 0
    *(("stream_interval", number) for _, number in CASES),  # the router's own
}


@pytest.mark.parametrize("place", PLACES)
def test_a_number_is_taken_everywhere_or_nowhere(place: str) -> None:
    for name, number in CASES:
        if place == "fields of the API" and (name, number) in OTHERWISE:
            continue
        if place == "topology files" and name not in SAMPLING.__annotations__:
            continue  # sent unread, and checked as an agent's request is
        others = {"max_new_tokens": 2**31 - 1} if name == "min_new_tokens" else {}
        try:
            PLACES[place]({name: number, **others})
            is_taken = True
        except InvalidRequest:
            is_taken = False
        assert is_taken == RANGES[name].allows(number), (name, number)


def test_neither_text_nor_booleans_are_numbers() -> None:
    for name in RANGES:
        for value in ("1", True, [1]):
            assert not RANGES[name].allows(value)
