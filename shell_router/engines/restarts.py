"""Whether and when a dead engine is started again. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `limit` restarts of one engine within `window_s`; each waits twice as long as the one before."""

    limit: int = 5
    delay_s: float = 1.0
    window_s: float = 600.0

    def next_delay_s(self, restarted_s: Sequence[float], now_s: float) -> float | None:
        """Seconds to wait before the next start; None where the engine is to be left down."""
        recent = sum(1 for at_s in restarted_s if now_s - at_s < self.window_s)
        if recent >= self.limit:
            return None
        return min(self.delay_s * 2.0**recent, LONGEST_DELAY_S)


DEFAULT_POLICY = RestartPolicy()
