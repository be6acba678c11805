"""The router's own code in virtual time: an optimization whose benefit ends is switched off by what
programs show.
"""

import asyncio
import math
from random import Random

from agent_cache import MemoryAgentPromptCache
from shell_router.core.engine import Generation, PrefillCost, Prefilled, ServedModel
from shell_router.core.events import PrefillIncrement
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.executor import Executor
from shell_router.moa.requests import MoaRequest
from shell_router.routing.holdout import Comparison, HoldoutSettings
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    PairCosts,
    PrefillCosts,
    TransferCosts,
)
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.text import SimulatedTokenizer, Written, filler
from shell_router.topology import Agent, Prompt, Topology

COSTS = PairCosts(PrefillCosts(0.05, 0.01, chunk_tokens=2048), DecodeCosts(0.03), TransferCosts())
READER = Prompt(prefix="{question}", slot=" {output}")


class Pair(SimulatedPair):
    """Once `worn`, what an update computes keeps the engine busy ten times as long."""

    worn = False

    async def prefill(self, request: Generation) -> Prefilled:
        if self.worn:
            draws = Random(request.rid)
            await self.prefilling.prefill(
                [draws.randrange(1 << 30) for _ in range(9 * len(request.input_ids))]
            )
        return await super().prefill(request)


def panel() -> Topology:
    leaves = {name: Agent(name, "m", sampling={"max_new_tokens": 400}) for name in ("a", "b")}
    root = Agent("root", "m", ("a", "b"), READER, {"max_new_tokens": 40})
    return Topology("panel", {**leaves, "root": root})


class World:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.pair = Pair(COSTS, self.write)
        cost = PrefillCost(COSTS.prefill.forward_s, COSTS.prefill.token_s)
        model = ServedModel("m", self.pair, SimulatedTokenizer(), 100_000, prefill_cost=cost)
        self.cache = MemoryAgentPromptCache(clock=loop.time, ttl_s=math.inf)
        self.executor = Executor(
            {"m": model}, self.cache, None, clock=loop.time, holdouts=HoldoutSettings()
        )
        self.asked = 0
        self.updates = 0

    def write(self, request: Generation) -> Written:
        tokens = 30 if ".root" in request.rid else Random(request.rid).randrange(150, 250)
        return Written.after_filler(tokens, request.rid, "", -0.1)

    async def ask(self, programs: int) -> None:
        for _ in range(programs):
            self.asked += 1
            chat = ({"role": "user", "content": filler(300, f"question {self.asked}")},)
            request = MoaRequest(f"q{self.asked}", "t", chat, seed=self.asked)
            await self.executor.run(panel(), request, self.count)

    def count(self, event: object) -> None:
        self.updates += isinstance(event, PrefillIncrement)

    def seen(self) -> Comparison:
        (only,) = self.executor.holdouts.comparisons()
        return only


async def worn_out() -> tuple[World, Comparison, Comparison]:
    world = World()
    async with world.cache:
        await world.ask(150)
        before = world.seen()
        world.pair.worn = True
        await world.ask(50)
        return world, before, world.seen()


def test_updates_that_begin_to_cost_ten_times_as_much_are_switched_off_within_fifty_programs() -> (
    None
):
    async def story() -> None:
        world, before, after = await worn_out()
        assert before.state == "on"
        assert before.benefit is not None
        assert before.benefit.mean > 0
        assert after.state == "off"
        assert after.benefit is not None
        assert after.benefit.mean < 0
        sent = world.updates
        async with MemoryAgentPromptCache(
            clock=asyncio.get_running_loop().time
        ) as world.executor.cache:
            await world.ask(10)
        assert world.updates == sent

    run_virtual(story())
