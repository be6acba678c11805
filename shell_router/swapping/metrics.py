"""Metrics of models that take turns, read at each scrape."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shell_router.core.durations import Durations
from shell_router.swapping.leases import ModelLeases
from shell_router.telemetry.metrics import PREFIX


@dataclass(frozen=True, eq=False)
class TurnMetrics(Collector):
    """The families of all models that take turns in one memory."""

    leases: ModelLeases

    def collect(self) -> Iterator[Metric]:
        """Read the families."""
        leases = self.leases
        counts = leases.counts
        loaded = len(leases.loaded)
        yield GaugeMetricFamily(PREFIX + "models_loaded", "Loaded models", loaded)
        waiting = "Requests that wait for their model"
        yield GaugeMetricFamily(PREFIX + "model_requests_waiting", waiting, leases.waiting)
        failures = "Failed model loads"
        yield CounterMetricFamily(PREFIX + "model_load_failures", failures, counts.failures)
        missing = "Loaded models that were gone after a restart"
        yield CounterMetricFamily(PREFIX + "models_missing", missing, counts.missing)
        yield _histogram("model_load_seconds", "Time of one model load", counts.loads)
        waits = "Waits for models, of requests that waited"
        yield _histogram("model_wait_seconds", waits, counts.waits)


def _histogram(name: str, meaning: str, durations: Durations) -> HistogramMetricFamily:
    family = HistogramMetricFamily(PREFIX + name, meaning, labels=())
    family.add_metric((), durations.buckets(), durations.sum_s)
    return family
