"""Adapters of one server: who holds one, who waits, what is loaded and what leaves."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from shell_router.engines.adapter_leases import AdapterLeases, Lease
from shell_router.errors import (
    AdapterFailed,
    ConfigError,
    EngineError,
    EngineUnavailable,
    EngineUnreachable,
)
from shell_router.http.tasks import TaskOwner
from shell_router.routing.adapter_cache import AdapterSettings
from tests.fakes.scripted_pair import until

CORRUPT = AdapterFailed("The file is cut off.")


class GatedLoader:
    """Loads at once, or where `gate` is closed when it opens. Raises `errors[name]` instead, while
    it is there.

    `loaded` is what lies on the server, `most` the most that did at a time, `loads` all loads in
    their order.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: dict[str, EngineError] = {}
        self.loaded: set[str] = set()
        self.loads: list[str] = []
        self.most = 0

    async def load(self, adapter: str) -> None:
        await self.gate.wait()
        await asyncio.sleep(0)
        if adapter in self.errors:
            raise self.errors[adapter]
        assert adapter not in self.loaded
        self.loaded.add(adapter)
        self.loads.append(adapter)
        self.most = max(self.most, len(self.loaded))

    async def unload(self, adapter: str) -> None:
        await asyncio.sleep(0)
        self.loaded.remove(adapter)


@dataclass
class Server:
    """Leases on one server, whose clock stands still unless a test moves it."""

    leases: AdapterLeases = field(init=False)
    loader: GatedLoader
    now_s: float = 0.0

    async def held(self, *adapters: str) -> list[Lease]:
        """A lease on each."""
        return [await self.leases.lease(adapter) for adapter in adapters]

    async def waits(self, adapter: str) -> "asyncio.Task[Lease]":
        """A request for the adapter that has to wait."""
        before = self.leases.waiting
        task = asyncio.create_task(self.leases.lease(adapter))
        await until(lambda: self.leases.waiting > before)
        return task


@asynccontextmanager
async def server(max_loaded: int = 1, window_s: float = 10.0, **more: Any) -> AsyncIterator[Server]:
    at, tasks = Server(GatedLoader()), TaskOwner()
    settings = AdapterSettings({}, max_loaded, window_s, **more)
    at.leases = AdapterLeases("server", at.loader, settings, tasks, lambda: at.now_s)
    yield at
    await tasks.aclose(1)


def close(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.close()


async def test_any_number_of_requests_hold_an_adapter_that_is_loaded_once() -> None:
    async with server() as at:
        leases = await at.held("a", "a", "a")
        assert at.loader.loads == ["a"]
        assert [lease.waited_s for lease in leases] == [0, 0, 0]


async def test_an_adapter_in_use_stays_until_its_last_request_has_ended() -> None:
    async with server() as at:
        leases = await at.held("a", "a")
        waiting = await at.waits("b")
        leases[0].close()
        leases[0].close()
        await asyncio.sleep(0)
        assert at.leases.loaded == ("a",)
        leases[1].close()
        assert (await waiting).at.name == "b"
        assert at.loader.loaded == {"b"}


async def test_a_free_place_is_filled_while_others_are_in_use() -> None:
    async with server(max_loaded=2) as at:
        await at.held("a", "b")
        assert at.loader.loaded == {"a", "b"}


async def test_within_the_window_requests_for_what_is_loaded_go_before_one_that_waits_for_another() -> (
    None
):
    async with server() as at:
        first = await at.held("a")
        await at.waits("b")
        at.now_s = 9.9
        second = await at.held("a")
        close(first)
        assert at.leases.loaded == ("a",)
        close(second)


async def test_after_the_window_a_waiting_request_gets_the_place_of_an_adapter_in_steady_use() -> (
    None
):
    async with server() as at:
        first = await at.held("a")
        waiting = await at.waits("b")
        at.now_s = 10.0
        overtaking = await at.waits("a")
        close(first)
        second = await waiting
        assert at.loader.loaded == {"b"}
        assert second.waited_s == 10.0
        second.close()
        assert (await overtaking).at.name == "a"


async def test_only_as_many_adapters_are_drained_as_there_are_others_that_wait_for_too_long() -> (
    None
):
    async with server(max_loaded=2) as at:
        (rare,), often = await at.held("rare"), await at.held("often", "often", "often")
        waiting = await at.waits("other")
        at.now_s = 10.0
        often += await at.held("often")
        drained = await at.waits("rare")
        rare.close()
        await waiting
        assert at.loader.loaded == {"often", "other"}
        drained.cancel()


async def test_drained_is_what_is_asked_for_least_by_now_and_not_when_it_was_loaded() -> None:
    async with server(max_loaded=2) as at:
        rare = await at.held("rare")
        often = await at.held("often", "often", "often")
        rare += await at.held(*["rare"] * 9)
        waiting = await at.waits("other")
        at.now_s = 10.0
        rare += await at.held("rare")
        close(often)
        await waiting
        assert at.loader.loaded == {"rare", "other"}
        close(rare)


async def test_an_adapter_that_was_drained_for_a_request_that_left_serves_again() -> None:
    async with server() as at:
        (first,) = await at.held("a")
        left = await at.waits("b")
        at.now_s = 10.0
        drained = await at.waits("a")
        left.cancel()
        assert (await drained).at.name == "a"
        assert at.loader.loads == ["a"]
        first.close()


async def test_first_come_first_served_drains_at_once() -> None:
    async with server(window_s=0.0) as at:
        first = await at.held("a")
        waiting, behind = await at.waits("b"), await at.waits("a")
        close(first)
        (await waiting).close()
        await behind
        assert at.loader.loads == ["a", "b", "a"]


async def test_the_least_recently_used_adapter_leaves() -> None:
    async with server(max_loaded=2) as at:
        close(await at.held("older", "newer", "older"))
        close(await at.held("new"))
        assert at.loader.loaded == {"older", "new"}


async def test_a_cancelled_request_leaves_the_line_and_nothing_is_loaded_for_it() -> None:
    async with server() as at:
        (first,) = await at.held("a")
        waiting = await at.waits("b")
        waiting.cancel()
        await asyncio.wait([waiting])
        first.close()
        await asyncio.sleep(0)
        assert (at.leases.waiting, at.loader.loads) == (0, ["a"])


@pytest.mark.parametrize("turns", range(12))
async def test_cancelled_at_any_moment_a_request_holds_nothing(turns: int) -> None:
    async with server() as at:
        close(await at.held("a"))
        task = asyncio.create_task(at.leases.lease("b"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result().close()
        close(await at.held("c"))  # there is a place, so b is not held
        assert at.leases.loaded == ("c",)


async def test_an_adapter_that_does_not_load_fails_its_own_requests_and_is_tried_again_when_asked_for() -> (
    None
):
    async with server(max_loaded=2) as at:
        at.loader.errors["corrupt"] = CORRUPT
        at.loader.gate.clear()
        failing = [await at.waits("corrupt"), await at.waits("corrupt")]
        fine = await at.waits("fine")
        at.loader.gate.set()
        for task in failing:
            with pytest.raises(AdapterFailed):
                await task
        assert (await fine).at.name == "fine"
        assert at.leases.counts.failures == 1
        del at.loader.errors["corrupt"]
        assert [lease.at.name for lease in await at.held("corrupt")] == ["corrupt"]


async def test_a_server_that_fails_while_it_loads_fails_all_who_wait_there() -> None:
    async with server() as at:
        at.loader.errors["a"] = EngineUnreachable("gone")
        at.loader.gate.clear()
        tasks = [await at.waits("a"), await at.waits("b")]
        at.loader.gate.set()
        for task in tasks:
            with pytest.raises(EngineUnreachable):
                await task
        assert at.leases.waiting == 0


async def test_an_adapter_that_the_server_lost_is_loaded_again_once_for_all_who_noticed() -> None:
    async with server() as at:
        leases = await at.held("a", "a")
        for lease in leases:
            at.loader.loaded.discard("a")
            at.loader.loaded.add("a")  # unloading what is gone is the loader's business
            await lease.missing()
            close(await at.held("a"))
        assert at.loader.loads == ["a", "a"]
        assert at.leases.counts.missing == 1


async def test_no_request_waits_longer_than_the_limit() -> None:
    async with server(wait_s=0.2) as at:
        await at.held("a")
        with pytest.raises(EngineUnavailable, match=r"'b' came free within 0\.2 s"):
            await at.leases.lease("b")


async def test_the_error_for_a_model_without_a_place_names_both_settings_that_give_more() -> None:
    tasks, settings = TaskOwner(), AdapterSettings({}, 1, 10.0, wait_s=0.2)
    leases = AdapterLeases("memory", GatedLoader(), settings, tasks, lambda: 0.0, kind="model")
    await leases.lease("a")
    with pytest.raises(
        EngineUnavailable, match=r"allow more models at a time: by max_loaded_models or pairs"
    ):
        await leases.lease("b")
    await tasks.aclose(1)


async def test_waiting_for_a_load_and_not_for_a_place_is_named_in_the_error() -> None:
    async with server(wait_s=0.2) as at:
        at.loader.gate.clear()
        with pytest.raises(EngineUnavailable, match=r"'a' was still being loaded after 0\.2 s"):
            await at.leases.lease("a")
        at.loader.gate.set()


async def test_what_is_about_to_be_wanted_is_loaded_ahead_but_never_in_the_place_of_what_is_waited_for() -> (
    None
):
    async with server(max_loaded=2) as at:
        (first,) = await at.held("a")
        at.leases.load_ahead("b")
        await until(lambda: at.loader.loaded == {"a", "b"})
        (held,) = await at.held("b")
        waiting = await at.waits("c")
        at.leases.load_ahead("d")
        first.close()
        await waiting
        assert at.loader.loaded == {"b", "c"}
        held.close()


@pytest.mark.parametrize("window_s", [0.0, 3.0, 1000.0])
@pytest.mark.parametrize("seed", range(3))
async def test_all_requests_are_served_and_no_more_adapters_loaded_than_allowed(
    seed: int, window_s: float
) -> None:
    draw = random.Random(seed)
    async with server(3, window_s) as at:
        served = 0

        async def ask(adapter: str, steps: int, leaves: bool) -> None:
            nonlocal served
            lease = await at.leases.lease(adapter)
            try:
                for _ in range(steps):
                    assert adapter in at.loader.loaded
                    await asyncio.sleep(0)
            finally:
                lease.close()
            served += not leaves

        tasks = []
        for _ in range(300):
            adapter, leaves = f"a{min(draw.randrange(12), draw.randrange(12))}", draw.random() < 0.1
            tasks.append(asyncio.create_task(ask(adapter, draw.randrange(20), leaves)))
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


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_loaded_adapters", 0), ("window_s", -1), ("wait_s", 0), ("load_s", 0)],
)
def test_impossible_settings_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        AdapterSettings(**{setting: value})
