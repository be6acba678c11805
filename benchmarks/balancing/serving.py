"""One setting under one load, in virtual time: the router's own dispatcher in front of simulated engines."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from balancing.lengths import Request
from balancing.stepped import Together
from shell_router.core.generation import Finish, Generation
from shell_router.core.hints import Hints
from shell_router.engines.simulated import PairCosts, Processor, SimulatedPair, Written
from shell_router.scheduling.settings import SchedulingSettings
from shell_router.simulation.fleet import Fleet
from shell_router.simulation.virtual_time import run_virtual

ENGINES = 2
EVENT_TOKENS = 16
Kind = Literal["shared", "stepped", "in step"]
"""How an engine prefills beside decoding: on a GPU that both share evenly, or step by step, alone or all together."""
_FILLER = tuple(range(1 << 14))


@dataclass(slots=True)
class Served:
    """Per request, in the order of their ends: seconds to the first token, per token after it, and in all.

    `ended` has when it was, whose, and its tokens, outputs counted twice; `taken_back` counts how often engines ran out
    of KV and took some of a request that was being written.
    """

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended: list[tuple[float, str, int]] = field(default_factory=list)
    elapsed_s: float = 0.0
    taken_back: int = 0


def served(
    requests: Sequence[Request],
    costs: PairCosts,
    scheduling: SchedulingSettings,
    *,
    kind: Kind = "shared",
    known: bool = False,
) -> Served:
    """Serve them all on two engines. With `known` the length of every output is known beforehand."""
    return run_virtual(_served(requests, costs, scheduling, kind, known))


async def _served(
    requests: Sequence[Request], costs: PairCosts, scheduling: SchedulingSettings, kind: Kind, known: bool
) -> Served:
    loop, done = asyncio.get_running_loop(), Served()
    outputs = {f"r{number}": one.output for number, one in enumerate(requests)}

    def write(request: Generation) -> Written:
        ids = _FILLER[: outputs[request.rid]]
        return Written(("",) * len(ids), ids, 0.0)

    stepped = None if kind == "shared" else Together(costs, write, ENGINES, in_step=kind == "in step")
    pairs = stepped.engines if stepped else [_engine(costs, write) for _ in range(ENGINES)]
    fleet = Fleet("qwen3-30b-a3b", pairs, scheduling)

    async def ask(number: int, one: Request) -> None:
        await asyncio.sleep(one.at_s)
        begun_s = loop.time()
        hints = Hints(one.user, output_tokens=one.output if known else None)
        sampling = {"max_new_tokens": 1 << 14, "stream_interval": EVENT_TOKENS}
        first_s = None
        async for item in fleet.generate(Generation(f"r{number}", _ids(number, one), sampling, hints=hints)):
            if first_s is None:
                first_s = loop.time()
            if isinstance(item, Finish):
                done.ttft_s.append(first_s - begun_s)
                if one.output > 1:
                    done.tpot_s.append((loop.time() - first_s) / (one.output - 1))
                done.total_s.append(loop.time() - begun_s)
                done.ended.append((loop.time(), one.user, one.prompt + 2 * one.output))
                done.prompt_tokens += item.prompt_tokens
                done.cached_tokens += item.cached_tokens

    async with fleet.followed(), asyncio.TaskGroup() as running:
        steps = running.create_task(stepped.run()) if stepped else None
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(requests):
                group.create_task(ask(number, one))
        done.elapsed_s = loop.time()
        if steps:
            steps.cancel()
    done.taken_back = sum(pair.taken_back if stepped else pair.decoding.taken_back for pair in pairs)
    return done


def _engine(costs: PairCosts, write: Callable[[Generation], Written]) -> SimulatedPair:
    """One GPU that prefills and decodes, chunk by chunk."""
    gpu = Processor()
    return SimulatedPair(costs, write, prefill_processor=gpu, decode_processor=gpu, one_engine=True)


def _ids(number: int, one: Request) -> list[int]:
    """Ids that begin as all of its user's do, and go on as nobody else's."""
    known = user_ids(one.user)
    own = (number + 1) << 40
    return [known + at for at in range(one.old)] + [own + at for at in range(one.prompt - one.old)]


def user_ids(user: str) -> int:
    """The first id of what a user says."""
    return sum(ord(letter) * 131**at for at, letter in enumerate(user)) % (1 << 30) << 14
