"""Metrics of engines, read from their fleets at each scrape."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shell_router.engines.fleet import Fleet
from shell_router.engines.server_client import ServerClient
from shell_router.routing.dispatcher import TrackedEngine
from shell_router.routing.holdout import Comparison
from shell_router.telemetry.metrics import PREFIX

ROLE = ("model", "role")
SERVER = ("model", "role", "url")
Server = TrackedEngine[ServerClient]
Family = type[CounterMetricFamily | GaugeMetricFamily]
GAUGE = GaugeMetricFamily
COUNT = CounterMetricFamily
SERVER_FAMILIES: tuple[tuple[Family, str, str, Callable[[Server, float], float | None]], ...] = (
    (
        GAUGE,
        "engine_requests",
        "Running requests of this router",
        lambda at, _: at.load.running + at.batch_load.running,
    ),
    (
        GAUGE,
        "engine_batch_requests",
        "Those of batches among them",
        lambda at, _: at.batch_load.running,
    ),
    (
        COUNT,
        "engine_failures",
        "Failures of the server: unreachable, silent, or 5xx",
        lambda at, _: at.engine.failures,
    ),
    (
        GAUGE,
        "engine_breaker_open",
        "1 while the circuit breaker is open",
        lambda at, _: at.breaker.open,
    ),
    (
        GAUGE,
        "engine_tokens",
        "Prompt and expected output tokens on the server",
        lambda at, _: at.load.tokens + at.batch_load.tokens,
    ),
    (
        GAUGE,
        "engine_kv_usage",
        "Share of the KV cache in use, as the server reports",
        lambda at, _: None if at.reported is None else at.reported.kv_usage,
    ),
    (
        GAUGE,
        "engine_cache_hit_rate",
        "Share of prompt tokens found cached, as reported",
        lambda at, _: None if at.reported is None else at.reported.hit_rate,
    ),
    (
        GAUGE,
        "engine_report_age_seconds",
        "Age of the server's last report",
        lambda at, now_s: at.age_s(now_s),
    ),
    (COUNT, "engine_reports_missed", "Polls without a report", lambda at, _: at.failed_polls),
)


@dataclass(frozen=True, eq=False)
class EngineMetrics(Collector):
    """The metric families of all engines.

    Attributes:
        fleets: By model, or by number if models are swapped.
        restarts: Give restarts by engine.
        clock: Gives monotonic seconds.
        comparisons: Gives the savings of optimizations.
    """

    fleets: Mapping[str, Fleet[Any]]
    restarts: Sequence[Callable[[], Mapping[str, int]]] = ()
    clock: Callable[[], float] = time.monotonic
    comparisons: Callable[[], Iterable[Comparison]] = tuple

    def collect(self) -> Iterator[Metric]:
        """Read all families."""
        retries = {alias: fleet.retried for alias, fleet in self.fleets.items()}
        restarts = {name: times for each in self.restarts for name, times in each().items()}
        yield _counts("engine_restarts", "Restarts of a dead engine", "engine", restarts)
        yield _counts("retries", "Requests sent again before their first token", "model", retries)
        waits = {alias: fleet.waited_for_prefix for alias, fleet in self.fleets.items()}
        yield _counts("prefix_waits", "Requests that waited for a common prefix", "model", waits)
        servers = [
            ((alias, at.engine.server.role, at.engine.server.public_url), at)
            for alias, fleet in self.fleets.items()
            for dispatcher in fleet.dispatchers.values()
            for at in dispatcher.tracked
        ]
        for kind, name, meaning, value in SERVER_FAMILIES:
            family = kind(PREFIX + name, meaning, labels=SERVER)
            for labels, at in servers:
                if (sample := value(at, self.clock())) is not None:
                    family.add_metric(labels, sample)
            yield family
        yield from self._queues()
        yield from self._optimizations()

    def _queues(self) -> Iterator[Metric]:
        """Count choices of servers, and requests that wait for one."""
        by = (*ROLE, "policy", "why")
        choices = CounterMetricFamily(
            PREFIX + "engine_choices", "Requests that got a server, by reason", labels=by
        )
        waiting = GaugeMetricFamily(
            PREFIX + "queue_requests", "Requests waiting in the router", labels=ROLE
        )
        meaning = "Waits in the router, of requests that waited"
        waited = HistogramMetricFamily(PREFIX + "queue_wait_seconds", meaning, labels=ROLE)
        for alias, fleet in self.fleets.items():
            for role, dispatcher in fleet.dispatchers.items():
                for why, count in dispatcher.choices.items():
                    choices.add_metric((alias, role, dispatcher.policy, why), count)
                waiting.add_metric((alias, role), dispatcher.waiting)
                waits = dispatcher.waits
                waited.add_metric((alias, role), waits.buckets(), waits.sum_s)
        yield from (choices, waiting, waited)

    def _optimizations(self) -> Iterator[GaugeMetricFamily]:
        for name, share, roles in (
            ("incremental_prefill", "latency", ()),
            ("drafts", "an agent's decode time", ("role",)),
        ):
            labels = "topology", "models", *roles
            on = GaugeMetricFamily(
                f"{PREFIX}{name}_on", "0 where it was switched off", labels=labels
            )
            saved = GaugeMetricFamily(
                f"{PREFIX}{name}_saved", f"Share of {share} that it saves", labels=labels
            )
            for comparison in self.comparisons():
                if comparison.compared.optimization == name:
                    values = comparison.compared[1 : 1 + len(labels)]
                    on.add_metric(values, comparison.state != "off")
                    if comparison.benefit is not None:
                        saved.add_metric(values, comparison.benefit.mean)
            yield from (on, saved)


def _counts(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, meaning, labels=[label])
    for labelled, count in counts.items():
        family.add_metric([labelled], count)
    return family
