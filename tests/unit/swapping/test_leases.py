"""Models that take turns: who holds one, who waits, what is loaded and what leaves."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from shell_router.errors import (
    EngineError,
    EngineUnavailable,
    EngineUnreachable,
    ModelFailed,
    WeightsLost,
)
from shell_router.http.tasks import TaskOwner
from shell_router.swapping.leases import ModelLeases
from shell_router.swapping.turns import LoadedModel
from tests.fakes.scripted_pair import until

CORRUPT = ModelFailed("The file is cut off.")


def least_recently_used(
    loaded: Sequence[LoadedModel], turns: dict[str, int]
) -> Sequence[LoadedModel]:
    return sorted(loaded, key=lambda at: at.used)


class GatedLoader:
    """Loads at once, or where `gate` is closed when it opens. Raises `errors[name]` instead, while
    it is there.

    `loaded` is what lies in memory, `most` the most that did at a time, `loads` all loads in their
    order.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: dict[str, EngineError] = {}
        self.loaded: set[str] = set()
        self.loads: list[str] = []
        self.most = 0

    async def load(self, model: str) -> None:
        await self.gate.wait()
        await asyncio.sleep(0)
        if model in self.errors:
            raise self.errors[model]
        assert model not in self.loaded
        self.loaded.add(model)
        self.loads.append(model)
        self.most = max(self.most, len(self.loaded))

    async def unload(self, model: str) -> None:
        await asyncio.sleep(0)
        self.loaded.remove(model)


@dataclass
class Held:
    """A lease that a test closes, or ends because the weights are lost."""

    model: str
    context: AbstractAsyncContextManager[None]

    async def close(self) -> None:
        await self.context.__aexit__(None, None, None)

    async def lose(self) -> None:
        lost = WeightsLost("gone")
        assert not await self.context.__aexit__(WeightsLost, lost, None)


@dataclass
class Memory:
    """Leases on the models in one memory, whose clock stands still unless a test moves it."""

    leases: ModelLeases = field(init=False)
    loader: GatedLoader
    now_s: float = 0.0
    kept: list[object] = field(default_factory=list)
    """Contexts that no test variable refers to: they would else be closed."""

    async def lease(self, model: str) -> Held:
        context = self.leases.lease(model)
        await context.__aenter__()
        self.kept.append(context)
        return Held(model, context)

    async def held(self, *models: str) -> list[Held]:
        """A lease on each."""
        return [await self.lease(model) for model in models]

    async def waits(self, model: str) -> "asyncio.Task[Held]":
        """A request for the model that has to wait."""
        before = self.leases.waiting
        task = asyncio.create_task(self.lease(model))
        await until(lambda: self.leases.waiting > before)
        return task


@asynccontextmanager
async def memory(
    places: int = 1, window_s: float = 10.0, wait_s: float = 60.0
) -> AsyncIterator[Memory]:
    at, tasks = Memory(GatedLoader()), TaskOwner()
    at.leases = ModelLeases(
        at.loader,
        tasks,
        lambda: at.now_s,
        places=places,
        window_s=window_s,
        wait_s=wait_s,
        order=least_recently_used,
    )
    yield at
    await tasks.aclose(1)


async def close(leases: Sequence[Held]) -> None:
    for lease in leases:
        await lease.close()


async def test_any_number_of_requests_hold_a_model_that_is_loaded_once() -> None:
    async with memory() as at:
        await at.held("a", "a", "a")
        assert at.loader.loads == ["a"]
        assert at.leases.counts.waits.sum_s == 0


async def test_a_model_in_use_stays_until_its_last_request_has_ended() -> None:
    async with memory() as at:
        leases = await at.held("a", "a")
        waiting = await at.waits("b")
        await leases[0].close()
        await asyncio.sleep(0)
        assert at.leases.loaded == ("a",)
        await leases[1].close()
        assert (await waiting).model == "b"
        assert at.loader.loaded == {"b"}


async def test_a_free_place_is_filled_while_others_are_in_use() -> None:
    async with memory(places=2) as at:
        await at.held("a", "b")
        assert at.loader.loaded == {"a", "b"}


async def test_within_the_window_requests_for_what_is_loaded_go_before_one_that_waits_for_another() -> (
    None
):
    async with memory() as at:
        first = await at.held("a")
        await at.waits("b")
        at.now_s = 9.9
        second = await at.held("a")
        await close(first)
        assert at.leases.loaded == ("a",)
        await close(second)


async def test_after_the_window_a_waiting_request_gets_the_place_of_a_model_in_steady_use() -> None:
    async with memory() as at:
        first = await at.held("a")
        waiting = await at.waits("b")
        at.now_s = 10.0
        overtaking = await at.waits("a")
        await close(first)
        second = await waiting
        assert at.loader.loaded == {"b"}
        assert at.leases.counts.waits.sum_s == 10.0
        await second.close()
        assert (await overtaking).model == "a"


async def test_only_as_many_models_are_drained_as_there_are_others_that_wait_for_too_long() -> None:
    async with memory(places=2) as at:
        (rare,), often = await at.held("rare"), await at.held("often", "often", "often")
        waiting = await at.waits("other")
        at.now_s = 10.0
        often += await at.held("often")
        drained = await at.waits("rare")
        await rare.close()
        await waiting
        assert at.loader.loaded == {"often", "other"}
        drained.cancel()


async def test_drained_is_what_is_asked_for_least_by_now_and_not_when_it_was_loaded() -> None:
    async with memory(places=2) as at:
        rare = await at.held("rare")
        often = await at.held("often", "often", "often")
        rare += await at.held(*["rare"] * 9)
        waiting = await at.waits("other")
        at.now_s = 10.0
        rare += await at.held("rare")
        await close(often)
        await waiting
        assert at.loader.loaded == {"rare", "other"}
        await close(rare)


async def test_a_model_that_was_drained_for_a_request_that_left_serves_again() -> None:
    async with memory() as at:
        (first,) = await at.held("a")
        left = await at.waits("b")
        at.now_s = 10.0
        drained = await at.waits("a")
        left.cancel()
        assert (await drained).model == "a"
        assert at.loader.loads == ["a"]
        await first.close()


async def test_first_come_first_served_drains_at_once() -> None:
    async with memory(window_s=0.0) as at:
        first = await at.held("a")
        waiting, behind = await at.waits("b"), await at.waits("a")
        await close(first)
        await (await waiting).close()
        await behind
        assert at.loader.loads == ["a", "b", "a"]


async def test_the_least_recently_used_model_leaves() -> None:
    async with memory(places=2) as at:
        await close(await at.held("older", "newer", "older"))
        await close(await at.held("new"))
        assert at.loader.loaded == {"older", "new"}


async def test_a_cancelled_request_leaves_the_line_and_nothing_is_loaded_for_it() -> None:
    async with memory() as at:
        (first,) = await at.held("a")
        waiting = await at.waits("b")
        waiting.cancel()
        await asyncio.wait([waiting])
        await first.close()
        await asyncio.sleep(0)
        assert (at.leases.waiting, at.loader.loads) == (0, ["a"])


@pytest.mark.parametrize("turns", range(12))
async def test_cancelled_at_any_moment_a_request_holds_nothing(turns: int) -> None:
    async with memory() as at:
        await close(await at.held("a"))
        task = asyncio.create_task(at.lease("b"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().close()
        await close(await at.held("c"))  # there is a place, so b is not held
        assert at.leases.loaded == ("c",)


async def test_a_model_that_does_not_load_fails_its_own_requests_and_is_tried_again_when_asked_for() -> (
    None
):
    async with memory(places=2) as at:
        at.loader.errors["corrupt"] = CORRUPT
        at.loader.gate.clear()
        failing = [await at.waits("corrupt"), await at.waits("corrupt")]
        fine = await at.waits("fine")
        at.loader.gate.set()
        for task in failing:
            with pytest.raises(ModelFailed):
                await task
        assert (await fine).model == "fine"
        assert at.leases.counts.failures == 1
        del at.loader.errors["corrupt"]
        assert [lease.model for lease in await at.held("corrupt")] == ["corrupt"]


async def test_an_engine_that_fails_while_it_loads_fails_all_who_wait() -> None:
    async with memory() as at:
        at.loader.errors["a"] = EngineUnreachable("gone")
        at.loader.gate.clear()
        tasks = [await at.waits("a"), await at.waits("b")]
        at.loader.gate.set()
        for task in tasks:
            with pytest.raises(EngineUnreachable):
                await task
        assert at.leases.waiting == 0


async def test_a_model_that_was_lost_is_loaded_again_once_for_all_who_noticed() -> None:
    async with memory() as at:
        leases = await at.held("a", "a")
        for lease in leases:
            at.loader.loaded.discard("a")
            at.loader.loaded.add("a")  # unloading what is gone is the loader's business
            await lease.lose()
            await close(await at.held("a"))
        assert at.loader.loads == ["a", "a"]
        assert at.leases.counts.missing == 1


async def test_no_request_waits_longer_than_the_limit() -> None:
    async with memory(wait_s=0.2) as at:
        await at.held("a")
        with pytest.raises(EngineUnavailable, match=r"'b' came free within 0\.2 s"):
            await at.lease("b")


async def test_the_error_for_a_model_without_a_place_names_both_settings_that_give_more() -> None:
    async with memory(wait_s=0.2) as at:
        await at.held("a")
        more = "allow more models at a time: by max_loaded_models or pairs"
        with pytest.raises(EngineUnavailable, match=more):
            await at.lease("b")


async def test_waiting_for_a_load_and_not_for_a_place_is_named_in_the_error() -> None:
    async with memory(wait_s=0.2) as at:
        at.loader.gate.clear()
        with pytest.raises(EngineUnavailable, match=r"'a' was still being loaded after 0\.2 s"):
            await at.lease("a")
        at.loader.gate.set()


async def test_what_is_about_to_be_wanted_is_loaded_ahead_but_never_in_the_place_of_what_is_waited_for() -> (
    None
):
    async with memory(places=2) as at:
        (first,) = await at.held("a")
        at.leases.load_ahead("b")
        await until(lambda: at.loader.loaded == {"a", "b"})
        (held,) = await at.held("b")
        waiting = await at.waits("c")
        at.leases.load_ahead("d")
        await first.close()
        await waiting
        assert at.loader.loaded == {"b", "c"}
        await held.close()


@pytest.mark.parametrize("window_s", [0.0, 3.0, 1000.0])
@pytest.mark.parametrize("seed", range(3))
async def test_all_requests_are_served_and_no_more_models_loaded_than_allowed(
    seed: int, window_s: float
) -> None:
    draw = random.Random(seed)
    async with memory(3, window_s) as at:
        served = 0

        async def ask(model: str, steps: int, leaves: bool) -> None:
            nonlocal served
            lease = await at.lease(model)
            try:
                for _ in range(steps):
                    assert model in at.loader.loaded
                    await asyncio.sleep(0)
            finally:
                await lease.close()
            served += not leaves

        tasks = []
        for _ in range(300):
            model, leaves = f"a{min(draw.randrange(12), draw.randrange(12))}", draw.random() < 0.1
            tasks.append(asyncio.create_task(ask(model, draw.randrange(20), leaves)))
            at.now_s += draw.random()
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
            if leaves:
                tasks[-1].cancel()
        async with asyncio.timeout(20):
            await asyncio.wait(tasks)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert served >= 250
        assert at.loader.most <= 3
        assert (at.leases.waiting, len(at.leases.loaded)) == (0, 3)
