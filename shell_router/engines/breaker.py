"""Keeps requests from a server that fails all the time. Pure: the caller says what time it is (monotonic seconds)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """`failures` in a row open the breaker; while it is open, one request in `open_s` is let through to try."""

    failures: int = 5
    open_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("failures", "open_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


DEFAULT_BREAKER = BreakerSettings()


class Breaker:
    """The circuit breaker of one server. One success closes it."""

    __slots__ = ("_failures", "_next_trial_s", "_settings")

    def __init__(self, settings: BreakerSettings = DEFAULT_BREAKER) -> None:
        self._settings = settings
        self._failures = 0
        self._next_trial_s = 0.0

    @property
    def open(self) -> bool:
        """Whether its server has failed so often in a row."""
        return self._failures >= self._settings.failures

    def wait_s(self, now_s: float) -> float:
        """Seconds until a request may be sent; 0 where one may be sent now."""
        return max(0.0, self._next_trial_s - now_s) if self.open else 0.0

    def tried(self, now_s: float) -> None:
        """A request is being sent: while the breaker is open the only one for `open_s`, whatever becomes of it."""
        self._next_trial_s = now_s + self._settings.open_s

    def failed(self, now_s: float) -> bool:
        """Note a failure; whether it opened the breaker."""
        self._failures += 1
        if self._failures != self._settings.failures:
            return False
        self._next_trial_s = now_s + self._settings.open_s
        return True

    def succeeded(self) -> bool:
        """Note a success; whether it closed the breaker."""
        closed = self.open
        self._failures = 0
        return closed
