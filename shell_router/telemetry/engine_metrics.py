"""Metrics of the engines, read at each scrape from those who keep the figures."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX = "shell_router_"
SERVER = ("model", "role", "url")


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the router knows of one engine server. `running` are the router's own requests to it."""

    model: str
    role: str
    url: str
    running: int
    failures: int
    breaker_open: bool


@dataclass(frozen=True, slots=True)
class EngineReports:
    """Who is asked: states of all servers, retried requests by model, and restarts by engine."""

    servers: Callable[[], Iterable[ServerState]] = tuple
    retries: Callable[[], Mapping[str, int]] = dict
    restarts: Callable[[], Mapping[str, int]] = dict


class EngineMetrics(Collector):
    """The families made of `EngineReports`."""

    def __init__(self, reports: EngineReports) -> None:
        self._reports = reports

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield _counts("engine_restarts", "Times a dead engine was started again", "engine", self._reports.restarts())
        yield _counts("retries", "Requests sent again after a failed attempt", "model", self._reports.retries())
        running = GaugeMetricFamily(PREFIX + "engine_requests", "Requests under way there", labels=SERVER)
        failures = CounterMetricFamily(PREFIX + "engine_failures", "Failures that were the server's", labels=SERVER)
        breaker = GaugeMetricFamily(PREFIX + "engine_breaker_open", "1 while it is only tried", labels=SERVER)
        for state in self._reports.servers():
            labels = (state.model, state.role, state.url)
            running.add_metric(labels, state.running)
            failures.add_metric(labels, state.failures)
            breaker.add_metric(labels, state.breaker_open)
        yield from (running, failures, breaker)


def _counts(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, meaning, labels=[label])
    for labelled, count in counts.items():
        family.add_metric([labelled], count)
    return family
