"""Several requests answered as the choices of one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from shell_router.api.choices import forward_choices
from shell_router.api.engine_chat import (
    COMPLETION,
    read_completion,
    read_engine_chat,
)
from shell_router.api.fields import CHAT
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
        async with forward_choices(engine.forward, [b"1", b"!", b"3"]):
            pass
    assert not engine.open


async def test_one_that_is_refused_is_the_answer() -> None:
    engine = Engine()
    async with forward_choices(engine.forward, [b"1", b"?", b"3"]) as relayed:
        assert (relayed.status, [chunk async for chunk in relayed.chunks]) == (400, [b"?"])
        assert engine.open == 3
    assert not engine.open


def chats(sent: dict[str, Any]) -> list[bytes]:
    return read_engine_chat(CHAT.read(sent), sent, "small", ChatServing())


def completions(**fields: object) -> list[bytes]:
    sent = {"model": "m", "prompt": "Hi", **fields}
    return read_completion(COMPLETION.read(sent), sent, "m")


def test_what_names_a_completions_user_is_not_forwarded() -> None:
    [body] = completions(prompt_cache_key="a", user="b")
    assert b"prompt_cache_key" not in read_native(
        body, "fresh", route="v1/completions"
    ).with_fields({})


def test_seeds_of_choices_follow_each_other() -> None:
    assert [orjson.loads(body)["seed"] for body in completions(n=3, seed=7)] == [7, 8, 9]
    assert [orjson.loads(body)["n"] for body in completions(n=2)] == [1, 1]


def test_the_values_of_all_choices_are_bounded_together() -> None:
    turn = {"role": "user", "content": '","' * 2**7}  # what stands in texts is no value
    assert len(chats({"messages": [turn] * 500, "n": 16})) == 16
    with pytest.raises(InvalidRequest, match="more than 50000 strings"):
        chats({"messages": [turn] * 1000, "n": 16})
    with pytest.raises(InvalidRequest, match="1000000 commas, times 16 choices"):
        completions(prompt=[1] * 2**16, n=16)


def test_the_bodies_of_all_choices_are_bounded_together() -> None:
    with pytest.raises(InvalidField) as refused:
        chats({"messages": [{"role": "user", "content": "x" * 2**21}], "n": 16})
    assert refused.value.field == "n"
