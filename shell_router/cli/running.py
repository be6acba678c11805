"""Runs a command's work on an event loop until it ends or a signal ends it."""

# ruff: noqa: PLC0415 - `--help` shall not wait for an event loop to load

import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import signal

INTERRUPTED = 130
TERMINATED = 143


def run(work: Coroutine[Any, Any, object]) -> int:
    """Run `work` to its end; Ctrl-C and SIGTERM cancel it, so that it ends what it started."""
    import asyncio
    import signal

    import uvloop

    from shell_router.core.garbage import collect_rarely

    collect_rarely()
    received: list[signal.Signals] = []
    try:
        uvloop.run(_ended_by_signals(work, received))
    except asyncio.CancelledError:
        return 128 + received[0] if received else TERMINATED
    return 0


async def _ended_by_signals(work: Coroutine[Any, Any, object], received: "list[signal.Signals]") -> None:
    import asyncio
    import signal

    task = asyncio.current_task()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        received.append(number)
        print("Stopping…", file=sys.stderr, flush=True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    await work
