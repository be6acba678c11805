"""How running requests end with their server."""

import asyncio

from shell_router.api.drain import Drain
from shell_router.errors import RouterStopping


async def test_a_stop_cuts_what_still_runs_and_leaves_what_has_reached_its_own_limit_to_end() -> (
    None
):
    drain, begun, all_cut, forced = Drain(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def overdue() -> None:
        """Its limit is over, and it still has to leave its engine."""
        try:
            with drain.deadline(0):
                try:
                    await asyncio.Event().wait()
                finally:
                    begun.set()
                    await all_cut.wait()
        finally:
            drain.release()

    async def running() -> None:
        try:
            with drain.deadline(3600):
                await asyncio.Event().wait()
        finally:
            all_cut.set()
            drain.release()

    drain.running = 2
    requests = [asyncio.create_task(one) for one in (overdue(), running())]
    await begun.wait()
    forced.set()
    async with asyncio.timeout(10):
        await drain.finish(3600, forced)
        ended = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(error) for error in ended] == [TimeoutError, RouterStopping]
