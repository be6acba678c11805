"""Whether and when a dead engine is started again. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from shell_router.launching.commands import HEARTBEAT_S, Role

LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `limit` restarts of one engine within `window_s`; each waits twice as long as the one before.

    A prefill stays away for `prefill_away_s` at least, until its decode has missed two heartbeats and forgotten it.
    """

    limit: int = 5
    delay_s: float = 1.0
    window_s: float = 600.0
    prefill_away_s: float = 2 * HEARTBEAT_S + 1.0

    def next_delay_s(self, role: Role, restarted_s: Sequence[float], now_s: float) -> float | None:
        """Seconds to wait before the next start; None where the engine is to be left down."""
        recent = sum(1 for at_s in restarted_s if now_s - at_s < self.window_s)
        if recent >= self.limit:
            return None
        backoff_s = min(self.delay_s * 2.0**recent, LONGEST_DELAY_S)
        return max(backoff_s, self.prefill_away_s) if role == "prefill" else backoff_s
