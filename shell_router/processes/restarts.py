"""The policy by which a process that has ended is started again, or left down."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from shell_router.errors import EngineUnreachable

log = logging.getLogger(__name__)

LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `limit` restarts within `window_s`, each after twice the delay of the one before.

    No restart waits less than `least_delay_s`.
    """

    limit: int = 5
    delay_s: float = 1.0
    window_s: float = 600.0
    least_delay_s: float = 0.0

    def next_delay_s(self, restarted_s: Sequence[float], now_s: float) -> float | None:
        """Return the seconds to wait before the next start; None to leave the process down."""
        recent = sum(1 for at_s in restarted_s if now_s - at_s < self.window_s)
        if recent >= self.limit:
            return None
        delay_s = min(self.delay_s * 2.0**recent, LONGEST_DELAY_S)
        return max(self.least_delay_s, delay_s)


DEFAULT_POLICY = RestartPolicy()


async def keep_running(
    wait_for_end: Callable[[], Awaitable[str]],
    start: Callable[[], Awaitable[None]],
    *,
    restarted_s: list[float],
    policy: RestartPolicy,
    clock: Callable[[], float] = monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Start a process again whenever it ends; return when the policy leaves it down.

    Args:
        wait_for_end: Waits for the end and returns a sentence that says how it ended.
        start: Returns when the process serves. If it does not, ends it and raises
            EngineUnreachable.
        restarted_s: The times of earlier restarts; each new one is appended.
        policy: Says how long to wait.
        clock: Seconds, for the policy.
        sleep: Waits before a restart.
    """
    while True:
        ending = await wait_for_end()
        delay_s = policy.next_delay_s(restarted_s, clock())
        if delay_s is None:
            log.error(
                "%s It ended too often and is left down; requests that need it fail. Read its log "
                "(after SIGKILL, look for too little memory), then start this command again.",
                ending,
            )
            return
        log.warning(
            "%s It is started again in %g s; until it is ready, requests that need it fail.",
            ending,
            delay_s,
        )
        await sleep(delay_s)
        restarted_s.append(clock())
        try:
            await start()
        except EngineUnreachable as error:
            log.warning("%s", error)
