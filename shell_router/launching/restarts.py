"""Whether and when a dead engine is started again."""

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
    """At most `limit` restarts of one engine within `window_s`; each waits twice as long as the one before.

    None waits less than `least_delay_s`.
    """

    limit: int = 5
    delay_s: float = 1.0
    window_s: float = 600.0
    least_delay_s: float = 0.0

    def next_delay_s(self, restarted_s: Sequence[float], now_s: float) -> float | None:
        """Seconds to wait before the next start; None where the engine is to be left down."""
        recent = sum(1 for at_s in restarted_s if now_s - at_s < self.window_s)
        if recent >= self.limit:
            return None
        return max(self.least_delay_s, min(self.delay_s * 2.0**recent, LONGEST_DELAY_S))


DEFAULT_POLICY = RestartPolicy()


async def keep_running(
    ended: Callable[[], Awaitable[str]],
    start: Callable[[], Awaitable[None]],
    *,
    restarted_s: list[float],
    policy: RestartPolicy,
    clock: Callable[[], float] = monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Start an engine again whenever it ends; return when it is to be left down.

    `ended` waits for its end and tells how it ended in a sentence. `start` returns when it serves, and raises
    EngineUnreachable where it does not; what is left of it ends then. Times of restarts are added to `restarted_s`.
    """
    while True:
        how = await ended()
        delay_s = policy.next_delay_s(restarted_s, clock())
        if delay_s is None:
            log.error(
                "%s It ended too often and is left down; requests that need it fail. Its log says why "
                "(SIGKILL: is there too little memory?); then start this command again.",
                how,
            )
            return
        log.warning("%s It is started again in %g s; until it is ready, requests that need it fail.", how, delay_s)
        await sleep(delay_s)
        restarted_s.append(clock())
        try:
            await start()
        except EngineUnreachable as error:
            log.warning("%s", error)
