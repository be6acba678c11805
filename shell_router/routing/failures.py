"""Circuit breakers, which keep requests away from failing engines, and retries."""

from dataclasses import dataclass

from shell_router.errors import EngineRejected, EngineUnreachable, ShellRouterError


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Settings of circuit breakers.

    A breaker opens after `failures` in a row; while it is open, one request in `open_s` probes the
    server.
    """

    failures: int = 5
    open_s: float = 5.0


DEFAULT_BREAKER = BreakerSettings()


class Breaker:
    """The circuit breaker of one server; one success closes it.

    The caller gives the time in monotonic seconds. No request may be sent before `blocked_until_s`.
    `failures` counts failures in a row; while it is 0, `note_success` need not be called.
    """

    __slots__ = ("_limit", "blocked_until_s", "failures", "open_s")

    def __init__(self, settings: BreakerSettings = DEFAULT_BREAKER) -> None:
        self.open_s = settings.open_s
        self.blocked_until_s = 0.0
        self._limit = settings.failures
        self.failures = 0

    @property
    def open(self) -> bool:
        """Whether the server has failed too often in a row."""
        return self.failures >= self._limit

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a request may be sent."""
        return max(0.0, self.blocked_until_s - now_s)

    def note_attempt(self, now_s: float) -> None:
        """Note that a request is sent; while the breaker is open, block others for `open_s`."""
        if self.failures >= self._limit:
            self.blocked_until_s = now_s + self.open_s

    def note_failure(self, now_s: float) -> bool:
        """Note a failure; return whether it opened the breaker."""
        self.failures += 1
        if self.failures != self._limit:
            return False
        self.blocked_until_s = now_s + self.open_s
        return True

    def note_success(self) -> bool:
        """Note a success; return whether it closed the breaker."""
        closed = self.failures >= self._limit
        self.failures = 0
        self.blocked_until_s = 0.0
        return closed


INTERNAL_ERROR = 500
RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server that is likely to serve the same request a moment later."""


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Settings of repeated attempts.

    There are at most `attempts`; before the second one `delay_s` pass, and twice as long before
    each further one. Each wait is up to `jitter` longer or shorter, so that requests that fail
    together are not sent again together.
    """

    attempts: int = 3
    delay_s: float = 0.05
    jitter: float = 0.2

    def wait_s(self, error: ShellRouterError, attempt: int, draw: float) -> float | None:
        """Return the seconds before the next attempt; None after the last.

        Requests whose server stalled, and requests that were aborted, are not sent again.

        Args:
            error: The failure.
            attempt: The number of the failed attempt, from 1.
            draw: Uniform in [0, 1).
        """
        if attempt >= self.attempts or not is_retryable(error):
            return None
        return self.delay_s * float(2 ** (attempt - 1)) * (1 + self.jitter * (2 * draw - 1))


DEFAULT_RETRIES = RetrySettings()


def is_retryable(error: ShellRouterError) -> bool:
    """Tell whether another server is likely to serve the same request."""
    if isinstance(error, EngineRejected):
        return error.status in RETRYABLE_STATUSES
    return isinstance(error, EngineUnreachable)
