"""Dead servers of a fleet: started again after a while, or left down."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from shell_router.engines.restarts import RestartPolicy

log = logging.getLogger(__name__)

LEFT_DOWN = (
    "It ended too often and is left down; requests that need it fail. "
    "Its last log lines say why (SIGKILL: was there too little memory?); then restart the router."
)


class Timer(Protocol):
    """Something to be done later."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]


def call_later(delay_s: float, act: Callable[[], None]) -> Timer:
    """Call `act` from the running event loop after `delay_s`."""
    return asyncio.get_running_loop().call_later(delay_s, act)


class ServerRestarts:
    """Starts each server of `names` again when it has ended, as `policy` says.

    `start` and `kill` do so by a server's name. One that was started again and is not ready `start_limit_s` later is
    killed, which counts as its next end.
    """

    def __init__(
        self,
        names: Iterable[str],
        policy: RestartPolicy,
        *,
        start: Callable[[str], None],
        kill: Callable[[str], None],
        start_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        later: Later = call_later,
    ) -> None:
        self._policy = policy
        self._start = start
        self._kill = kill
        self._start_limit_s = start_limit_s
        self._clock = clock
        self._later = later
        self._restarted_s: dict[str, list[float]] = {name: [] for name in names}
        self._timers: dict[str, Timer] = {}
        self._stopped = False

    @property
    def counts(self) -> Mapping[str, int]:
        """By name, how often the server was started again."""
        return {name: len(times_s) for name, times_s in self._restarted_s.items()}

    def ended(self, name: str, what: str) -> None:
        """The server has ended, which the sentence `what` tells for the log."""
        self._cancel(name)
        if self._stopped:
            return
        delay_s = self._policy.next_delay_s(self._restarted_s[name], self._clock())
        if delay_s is None:
            log.error("%s %s", what, LEFT_DOWN)
            return
        log.warning("%s It is started again in %g s; until it is ready, requests that need it fail.", what, delay_s)
        self._timers[name] = self._later(delay_s, partial(self._start_again, name))

    def ready(self, name: str) -> None:
        """The server serves."""
        self._cancel(name)

    def stop(self) -> None:
        """Start nothing from now on, and say nothing of servers that end."""
        self._stopped = True
        for name in tuple(self._timers):
            self._cancel(name)

    def _cancel(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _start_again(self, name: str) -> None:
        self._restarted_s[name].append(self._clock())
        self._timers[name] = self._later(self._start_limit_s, partial(self._kill_late, name))
        self._start(name)

    def _kill_late(self, name: str) -> None:
        log.warning("Embedded engine %s was not ready %g s after its restart; it is killed.", name, self._start_limit_s)
        self._kill(name)
