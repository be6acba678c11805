"""Stalls of the event loop, and the tokens that tenants use."""

import asyncio
import logging

from prometheus_client import Gauge

log = logging.getLogger(__name__)

STALL_CHECK_S = 0.05
LONG_STALL_S = 0.1


class StallWatch:
    """Measures stalls of the event loop until `close`, by how late a timer is.

    `gauge` shows the longest stall of this minute and the one before. A stall over LONG_STALL_S is
    a defect, and is logged.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, gauge: Gauge) -> None:
        self._loop = loop
        self._longest = [0.0, 0.0]  # of this minute and the one before
        self._due_s = self._window_s = loop.time()
        gauge.set_function(lambda: max(self._longest))
        self._tick()

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = max(0.0, now_s - self._due_s)
        if now_s - self._window_s >= 60:
            self._longest = [0.0, self._longest[0]]
            self._window_s = now_s
        self._longest[0] = max(self._longest[0], late_s)
        if late_s > LONG_STALL_S:
            log.warning("the event loop was held up for %.0f ms: all requests waited", 1e3 * late_s)
        self._due_s = now_s + STALL_CHECK_S
        self._timer = self._loop.call_later(STALL_CHECK_S, self._tick)

    def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()


class TokenRates:
    """The tokens that tenants used in the last minute, approximately.

    The minute before this one counts with the share of it that is less than 60 s ago.
    """

    def __init__(self) -> None:
        # by tenant: the minute, its tokens, the tokens of the minute before
        self._used: dict[str, tuple[float, float, float]] = {}

    def add(self, tenant: str, tokens: float, now_s: float) -> None:
        """Count tokens of prompts and outputs that the tenant has used."""
        minute, used, before = self._at(tenant, now_s)
        self._used[tenant] = minute, used + tokens, before

    def wait_s(self, tenant: str, limit: float, now_s: float) -> float:
        """Return the seconds until the tenant, if it uses no more, is below `limit`; 0 if it is."""
        minute, used, before = self._at(tenant, now_s)
        passed = now_s / 60 - minute
        if used >= limit:
            return 60 * (2 - passed - limit / used)
        if before:
            return max(0.0, 60 * (1 - passed - (limit - used) / before))
        return 0.0

    def _at(self, tenant: str, now_s: float) -> tuple[float, float, float]:
        minute = now_s // 60
        last, used, before = self._used.get(tenant, (minute, 0.0, 0.0))
        if last == minute:
            return minute, used, before
        return minute, 0.0, used if last == minute - 1 else 0.0
