"""Language models as experts: what a sample is, what an output is, and a batch of them on one engine."""

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from shell_router.core.generation import Finish, Generation, Tokens
from shell_router.errors import ConfigError, EngineError, ExpertFailed, PromptTooLong
from shell_router.expert_pools.values import Expert, Tier


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sample: token ids, as models of a pool may have different tokenizers, and SGLang's `sampling_params`."""

    input_ids: tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generated:
    """An output: the ids and the text that were written, and how that ended."""

    ids: tuple[int, ...]
    text: str
    finish: Finish


class Generates(Protocol):
    """The part of `core.generation.Engine` that experts need."""

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        ...


async def generate_all(
    engine: Generates, expert: Expert, prompts: Sequence[Prompt]
) -> Sequence[Generated | ExpertFailed]:
    """All at the same time; what an engine refuses, or fails on, fails that prompt alone."""
    return await asyncio.gather(*(_generated(engine, expert, prompt) for prompt in prompts))


async def _generated(engine: Generates, expert: Expert, prompt: Prompt) -> Generated | ExpertFailed:
    ids, text = list[int](), list[str]()
    request = Generation(f"{random.getrandbits(128):032x}", prompt.input_ids, prompt.sampling)
    try:
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, Finish):
                    return Generated(tuple(ids), "".join(text), event)
                ids += event.ids
                text.append(event.text)
    except (EngineError, PromptTooLong) as error:
        failed = ExpertFailed(f"{expert.name} did not answer: {error.args[0]}", remedy=error.remedy)
        failed.__cause__ = error
        return failed
    raise AssertionError("an answer ends with a Finish or raises")


def refuse_host_memory(place: str) -> None:
    """Raise ConfigError for a load into host memory, where no engine keeps weights but in files."""
    if place == Tier.HOST:
        raise ConfigError(
            "Models of engines are not kept in host memory.",
            remedy="Open the pool with host_bytes=0: what was read lately is in the system's page cache.",
        )
