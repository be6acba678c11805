"""Whether and when a launched engine is started again. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from shell_router.engines.restarts import DEFAULT_POLICY, RestartPolicy
from shell_router.launching.commands import HEARTBEAT_S, Role


@dataclass(frozen=True, slots=True)
class EngineRestarts:
    """As `policy` says, but a prefill stays away for `prefill_away_s` at least.

    Its decode has then missed two heartbeats and forgotten it.
    """

    policy: RestartPolicy = DEFAULT_POLICY
    prefill_away_s: float = 2 * HEARTBEAT_S + 1.0

    def next_delay_s(self, role: Role, restarted_s: Sequence[float], now_s: float) -> float | None:
        """Seconds to wait before the next start; None where the engine is to be left down."""
        delay_s = self.policy.next_delay_s(restarted_s, now_s)
        if delay_s is None or role == "decode":
            return delay_s
        return max(delay_s, self.prefill_away_s)
