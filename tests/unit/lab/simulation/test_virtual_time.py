import asyncio
import threading

import pytest

from shell_router.lab.simulation.virtual_time import Stuck, run_virtual


def test_sleeping_takes_its_time_and_everything_happens_in_order() -> None:
    async def run() -> list[tuple[float, str]]:
        loop, seen = asyncio.get_running_loop(), list[tuple[float, str]]()

        async def sleeper(name: str, *naps_s: float) -> None:
            for nap_s in naps_s:
                await asyncio.sleep(nap_s)
                seen.append((loop.time(), name))

        await asyncio.gather(sleeper("a", 3600, 3600), sleeper("b", 5000), sleeper("c", 0))
        return seen

    assert run_virtual(run()) == [(0, "c"), (3600, "a"), (5000, "b"), (7200, "a")]


def test_limits_strike_at_their_time() -> None:
    async def run() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == pytest.approx(30)


def test_waiting_for_what_will_never_happen_is_an_error() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run_virtual(forever())


def test_what_would_run_on_a_thread_runs_at_once_and_fails_where_it_is_waited_for() -> None:
    async def run() -> tuple[bool, float]:
        thread = await asyncio.to_thread(threading.get_ident)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return thread == threading.get_ident(), asyncio.get_running_loop().time()

    assert run_virtual(run()) == (True, 0)


def test_every_run_begins_at_zero() -> None:
    async def now() -> float:
        await asyncio.sleep(1)
        return asyncio.get_running_loop().time()

    assert (run_virtual(now()), run_virtual(now())) == (1, 1)
