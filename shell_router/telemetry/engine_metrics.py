"""Metrics of the engines, read at each scrape from those who keep the figures."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX = "shell_router_"
SERVER = ("model", "role", "url")


@dataclass(frozen=True, slots=True)
class AdapterState:
    """Adapters `loaded` on a server and requests `waiting` for theirs; the others are counted since the start."""

    loaded: int
    waiting: int
    loads: int
    load_s: float
    waited: int
    waited_s: float
    failures: int
    missing: int


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the router knows of one engine server.

    `running` are the router's own requests to it, of `tokens` in all, expected outputs included. `kv_usage` and
    `hit_rate` are what it told `age_s` ago, None where it never did, and `unheard` counts the times when it did not.
    `adapters` is None for a model without any.
    """

    model: str
    role: str
    url: str
    running: int
    failures: int
    breaker_open: bool
    tokens: int = 0
    kv_usage: float | None = None
    hit_rate: float | None = None
    age_s: float | None = None
    unheard: int = 0
    adapters: AdapterState | None = None


@dataclass(frozen=True, slots=True)
class QueueState:
    """The servers of one role of a model as a whole: choices by reason, requests that wait, and have waited."""

    model: str
    role: str
    policy: str
    choices: Mapping[str, int]
    waiting: int
    waited: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class EngineReports:
    """Who is asked: states of all servers and of their queues, retried requests by model, and restarts by engine."""

    servers: Callable[[], Iterable[ServerState]] = tuple
    queues: Callable[[], Iterable[QueueState]] = tuple
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
        states = list(self._reports.servers())
        for state in states:
            labels = (state.model, state.role, state.url)
            running.add_metric(labels, state.running)
            failures.add_metric(labels, state.failures)
            breaker.add_metric(labels, state.breaker_open)
        yield from (running, failures, breaker)
        yield from _told(states)
        yield from _adapters(states)
        yield from _queues(list(self._reports.queues()))


def _told(states: Sequence[ServerState]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """What is known of load: exact counts of the router's own, and what servers tell."""
    gauges: tuple[tuple[str, str, Callable[[ServerState], float | None]], ...] = (
        ("engine_tokens", "Tokens of requests there, outputs still expected included", lambda state: state.tokens),
        ("engine_kv_usage", "Share of its KV in use, as it told", lambda state: state.kv_usage),
        ("engine_cache_hit_rate", "Share of prompt tokens that it found cached, as it told", lambda one: one.hit_rate),
        ("engine_report_age_seconds", "How long ago it told its state", lambda state: state.age_s),
    )
    for name, meaning, value in gauges:
        family = GaugeMetricFamily(PREFIX + name, meaning, labels=SERVER)
        for state in states:
            if (found := value(state)) is not None:
                family.add_metric((state.model, state.role, state.url), found)
        yield family
    silent = CounterMetricFamily(PREFIX + "engine_reports_missed", "Times it did not tell its state", labels=SERVER)
    for state in states:
        silent.add_metric((state.model, state.role, state.url), state.unheard)
    yield silent


def _adapters(states: Sequence[ServerState]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Of servers whose model has adapters."""
    kinds: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...] = (
        (GaugeMetricFamily, "adapters_loaded", "Adapters that are loaded there", "loaded"),
        (GaugeMetricFamily, "adapter_requests_waiting", "Requests that wait for their adapter", "waiting"),
        (CounterMetricFamily, "adapter_loads", "Times an adapter was loaded", "loads"),
        (CounterMetricFamily, "adapter_load_seconds", "How long that took, in all", "load_s"),
        (CounterMetricFamily, "adapter_waited", "Requests that had to wait for their adapter", "waited"),
        (CounterMetricFamily, "adapter_waited_seconds", "How long they waited, in all", "waited_s"),
        (CounterMetricFamily, "adapter_load_failures", "Times an adapter could not be loaded", "failures"),
        (CounterMetricFamily, "adapters_missing", "Times a loaded adapter was found to be gone", "missing"),
    )
    for kind, name, meaning, count in kinds:
        family = kind(PREFIX + name, meaning, labels=SERVER)
        for state in states:
            if state.adapters is not None:
                family.add_metric((state.model, state.role, state.url), getattr(state.adapters, count))
        yield family


def _queues(states: Sequence[QueueState]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """How engines were chosen, and who waits for one."""
    role = ("model", "role")
    choices = CounterMetricFamily(PREFIX + "engine_choices", "Requests by the reason", labels=(*role, "policy", "why"))
    waiting = GaugeMetricFamily(PREFIX + "queue_requests", "Requests that wait in the router", labels=role)
    waited = CounterMetricFamily(PREFIX + "queue_waited", "Requests that had to wait in the router", labels=role)
    seconds = CounterMetricFamily(PREFIX + "queue_waited_seconds", "How long they waited, in all", labels=role)
    for state in states:
        labels = (state.model, state.role)
        for why, count in state.choices.items():
            choices.add_metric((*labels, state.policy, why), count)
        waiting.add_metric(labels, state.waiting)
        waited.add_metric(labels, state.waited)
        seconds.add_metric(labels, state.waited_s)
    yield from (choices, waiting, waited, seconds)


def _counts(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, meaning, labels=[label])
    for labelled, count in counts.items():
        family.add_metric([labelled], count)
    return family
