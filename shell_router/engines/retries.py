"""Whether a request that failed is sent again, and after how long. Pure."""

from dataclasses import dataclass

from shell_router.errors import AdapterMissing, EngineRejected, EngineUnreachable, ShellRouterError

INTERNAL_ERROR = 500
PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server that may well serve the same request a moment later."""


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """At most `attempts` in all; before the second `delay_s`, and twice as long before each further one.

    Each wait is made up to `jitter` longer or shorter, so that requests that failed together do not return together.
    """

    attempts: int = 3
    delay_s: float = 0.05
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}")

    def wait_s(self, error: ShellRouterError, attempt: int, draw: float) -> float | None:
        """Seconds before the attempt after number `attempt` (from 1); None where it was the last.

        `draw` is uniform in [0, 1). A request whose server fell silent has waited long enough, and one that was
        aborted is not wanted: neither is sent again.
        """
        if attempt >= self.attempts or not _passing(error):
            return None
        return self.delay_s * float(2 ** (attempt - 1)) * (1 + self.jitter * (2 * draw - 1))


DEFAULT_RETRIES = RetrySettings()


def _passing(error: ShellRouterError) -> bool:
    if isinstance(error, EngineRejected):
        return error.status in PASSING_STATUSES
    return isinstance(error, EngineUnreachable | AdapterMissing)
