"""How running requests end with their server."""

import asyncio

from shell_router.api.drain import Drain
from shell_router.errors import RouterStopping
from shell_router.moa.deadline import Deadline, Deadlines


async def test_a_stop_cuts_what_still_runs_and_leaves_what_has_reached_its_own_limit_to_end() -> (
    None
):
    deadlines = Deadlines()
    drain = Drain(deadlines)
    begun, all_cut, forced = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def end_one() -> None:
        drain.running -= 1
        if not drain.running:
            drain.idle.set()

    async def overdue() -> None:
        """Its limit is over, and it still has to leave its engine."""
        try:
            with Deadline(0, deadlines):
                try:
                    await asyncio.Event().wait()
                finally:
                    begun.set()
                    await all_cut.wait()
        finally:
            end_one()

    async def running() -> None:
        try:
            with Deadline(3600, deadlines):
                await asyncio.Event().wait()
        finally:
            all_cut.set()
            end_one()

    drain.running = 2
    requests = [asyncio.create_task(one) for one in (overdue(), running())]
    await begun.wait()
    forced.set()
    async with asyncio.timeout(10):
        await drain.finish(3600, forced)
        ended = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(error) for error in ended] == [TimeoutError, RouterStopping]
