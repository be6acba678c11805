"""Several requests answered as the choices of one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from shell_router.api.engine_chat import choices_as_one, read_completion, read_engine_chat
from shell_router.api.fields import Fields, parse_body
from shell_router.core.engine import ChatServing, Relayed
from shell_router.engines.native_body import read_native
from shell_router.errors import EngineUnreachable, InvalidField, InvalidRequest


class Engine:
    """Answers a body with itself; `!` cannot be reached, `?` is refused. `open` counts those under
    way.
    """

    def __init__(self) -> None:
        self.open = 0

    @asynccontextmanager
    async def forward(self, body: bytes) -> AsyncIterator[Relayed]:
        if body == b"!":
            raise EngineUnreachable("no engine.")
        self.open += 1
        try:
            yield Relayed(400 if body == b"?" else 200, "application/json", self._answer(body))
        finally:
            self.open -= 1

    async def _answer(self, body: bytes) -> AsyncIterator[bytes]:
        yield body


async def test_one_that_cannot_be_sent_fails_all_and_leaves_none_running() -> None:
    engine = Engine()
    with pytest.raises(EngineUnreachable):
        async with choices_as_one(engine.forward, [b"1", b"!", b"3"]):
            pass
    assert not engine.open


async def test_one_that_is_refused_is_the_answer() -> None:
    engine = Engine()
    async with choices_as_one(engine.forward, [b"1", b"?", b"3"]) as relayed:
        assert (relayed.status, [chunk async for chunk in relayed.chunks]) == (400, [b"?"])
        assert engine.open == 3
    assert not engine.open


def test_what_names_a_completions_user_is_not_forwarded() -> None:
    asked = {"model": "m", "prompt": "Hi", "prompt_cache_key": "a", "user": "b"}
    [body] = read_completion(parse_body(orjson.dumps(asked)), "m")
    assert b"prompt_cache_key" not in read_native(
        body, "fresh", route="v1/completions"
    ).with_fields({})


def test_the_values_of_all_choices_are_bounded_together() -> None:
    turn = {"role": "user", "content": '","' * 2**7}  # what stands in texts is no value
    for count, is_fit in ((500, True), (1000, False)):
        body = Fields({"messages": [turn] * count, "n": 16})
        if is_fit:
            assert len(read_engine_chat(body, "small", ChatServing())) == 16
        else:
            with pytest.raises(InvalidRequest, match="more than 50000 strings"):
                read_engine_chat(body, "small", ChatServing())
    with pytest.raises(InvalidRequest, match="1000000 commas, times 16 choices"):
        read_completion(Fields({"prompt": [1] * 2**16, "n": 16}), "small")


def test_the_bodies_of_all_choices_are_bounded_together() -> None:
    body = Fields({"messages": [{"role": "user", "content": "x" * 2**21}], "n": 16})
    with pytest.raises(InvalidField) as refused:
        read_engine_chat(body, "small", ChatServing())
    assert refused.value.field == "n"
