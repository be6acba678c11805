"""Times and CPU of one piece of load."""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from overhead.processes import Process


@dataclass(frozen=True, slots=True)
class Spent:
    """Wall-clock and CPU seconds while something ran. `router_s` is None where there is none."""

    wall_s: float
    router_s: float | None
    engine_s: float
    client_s: float


@dataclass(frozen=True, slots=True)
class Watched:
    """The processes whose CPU time is read."""

    router: Process | None
    engine: Process

    async def spent(self, load: Callable[[], Awaitable[None]]) -> Spent:
        """What was spent while `load` ran."""
        before, started_s = self._cpu_s(), time.monotonic()
        await load()
        wall_s, after = time.monotonic() - started_s, self._cpu_s()
        router_s, engine_s, client_s = (one - other for one, other in zip(after, before, strict=True))
        return Spent(wall_s, router_s if self.router else None, engine_s, client_s)

    def _cpu_s(self) -> tuple[float, float, float]:
        return self.router.cpu_s() if self.router else 0.0, self.engine.cpu_s(), time.process_time()


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a set of times, in milliseconds."""

    p50_ms: float
    p99_ms: float


def percentiles(times_s: Sequence[float]) -> Percentiles:
    """Median and 99th percentile."""
    cuts = statistics.quantiles(times_s, n=100, method="inclusive")
    return Percentiles(1e3 * cuts[49], 1e3 * cuts[98])
