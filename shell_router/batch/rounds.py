"""Asks a loaded model many prompts, for as long as its engine answers."""

import asyncio
from collections.abc import Callable, Sequence

from shell_router.batch.answering import Prompt, answered
from shell_router.batch.journal import Output
from shell_router.core.model import ServedModel
from shell_router.errors import EngineError

Heard = Callable[[Output], None]
"""Told of each output as it comes."""

Left = tuple[list[Prompt], str]
"""Prompts that stay without an output, and an error that kept one of them from it."""


async def in_rounds(model: ServedModel, prompts: Sequence[Prompt], at_once: int, heard: Heard) -> Left:
    """`at_once` of them at the same time, and those that failed once more for as long as a round answers some.

    What is left stands in the order in which it was given.
    """
    left, failure = list(prompts), ""
    while left:
        failed = await _round(model, left, at_once, heard)
        if not failed:
            return [], ""
        failure = next(iter(failed.values()))
        if len(failed) == len(left):
            break
        left = [prompt for prompt in left if prompt in failed]
    return left, failure


async def one_by_one(model: ServedModel, prompts: Sequence[Prompt], heard: Heard) -> Left:
    """One after the other, up to the first that fails."""
    for number, prompt in enumerate(prompts):
        try:
            output = await answered(model, prompt)
        except EngineError as error:
            return list(prompts[number:]), str(error)
        heard(output)
    return [], ""


async def _round(model: ServedModel, prompts: Sequence[Prompt], at_once: int, heard: Heard) -> dict[Prompt, str]:
    """Ask each once; those that the engine failed to answer, with its errors."""
    failed: dict[Prompt, str] = {}
    slots = asyncio.Semaphore(at_once)

    async def ask(prompt: Prompt) -> None:
        async with slots:
            try:
                output = await answered(model, prompt)
            except EngineError as error:
                failed[prompt] = str(error)
                return
        heard(output)

    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(ask(prompt))
    return failed
