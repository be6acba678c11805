"""One question in one setting, from the request bodies to a record."""

import asyncio
from collections.abc import Mapping
from typing import Any

from shell_router.core.grading import read_answer
from shell_router.core.vote import plurality
from shell_router.errors import ShellRouterError
from shell_router.evaluation.client import Asks
from shell_router.evaluation.dataset import Item
from shell_router.evaluation.options import Sampling
from shell_router.evaluation.records import Record
from shell_router.evaluation.replies import Reply
from shell_router.evaluation.rounds import request_seed
from shell_router.evaluation.settings import Setting

VOTE_TOP_P = 0.95
"""Of the members of a vote."""


async def asked(client: Asks, setting: Setting, item: Item, seed: int, sampling: Sampling) -> Record:
    """The record of `item` in `setting`; a request that fails gives one too."""
    try:
        replies = await _answered(client, bodies(setting, item, seed, sampling))
    except ShellRouterError as error:
        return Record(item.index, seed, setting.name, right=False, stated=None, latency_s=0.0, error=str(error))
    return graded(setting, item, seed, replies)


def bodies(setting: Setting, item: Item, seed: int, sampling: Sampling) -> list[dict[str, Any]]:
    """The chat completions that one answer takes: one, or those of all members of a vote."""
    return [
        {
            "model": member,
            "messages": [{"role": "user", "content": item.question}],
            "seed": request_seed(seed, item.index, place),
            **({"metadata": dict(item.labels)} if item.labels else {}),
            **_sampling(setting, sampling),
        }
        for place, member in enumerate(setting.members)
    ]


def _sampling(setting: Setting, sampling: Sampling) -> Mapping[str, Any]:
    wanted: dict[str, Any] = {"temperature": sampling.temperature}
    if setting.kind in ("model", "auto"):
        wanted = {"temperature": sampling.temperature or 0.0, "max_tokens": sampling.max_tokens}
    if setting.kind == "vote":
        tokens = {"max_tokens": sampling.max_tokens}
        wanted = {"temperature": sampling.vote_temperature, "top_p": VOTE_TOP_P, **tokens}
    return {name: value for name, value in wanted.items() if value is not None}


async def _answered(client: Asks, wanted: list[dict[str, Any]]) -> list[Reply]:
    """All replies, asked for at once. The first that fails takes the others with it and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(client.ask(body)) for body in wanted]
    except* ShellRouterError as failures:
        raise _first(failures) from None
    return [task.result() for task in asked]


def _first(failures: BaseExceptionGroup[ShellRouterError]) -> ShellRouterError:
    first = failures.exceptions[0]
    assert isinstance(first, ShellRouterError)
    return first


def graded(setting: Setting, item: Item, seed: int, replies: list[Reply]) -> Record:
    """The record of what was answered; of several answers the plurality counts."""
    values = [read_answer(reply.text, item.grader) for reply in replies]
    winner = plurality(values)
    value = None if winner is None else values[winner]
    return Record(
        item.index,
        seed,
        setting.name,
        right=value is not None and value == read_answer(item.answer, item.grader),
        stated=None if value is None else str(value),
        latency_s=max(reply.latency_s for reply in replies),
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        completion_tokens=sum(reply.completion_tokens for reply in replies),
        agents=tuple(agent for reply in replies for agent in reply.agents),
        exits=tuple(judged for reply in replies for judged in reply.exits),
    )
