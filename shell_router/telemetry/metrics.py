"""Every metric the router exports, in one registry (docs/metrics.md lists them)."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shell_router.telemetry.engine_metrics import PREFIX, EngineMetrics, EngineReports

NO_ENGINES = EngineReports()
SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
SHARES = tuple(step / 10 for step in range(1, 11))


class Metrics:
    """The metric families. `cache_degraded` and what `engines` holds are asked at every scrape."""

    def __init__(
        self, *, cache_degraded: Callable[[], bool] = lambda: False, engines: EngineReports = NO_ENGINES
    ) -> None:
        self.registry = CollectorRegistry()
        self._http()
        self._choices()
        self._agents()
        self._prefill()
        self._runs()
        self._gate()
        self._batches()
        degraded = self._gauge("cache_degraded", "1 while the prompt cache is served from memory, Redis being away")
        degraded.set_function(lambda: float(cache_degraded()))
        self.registry.register(EngineMetrics(engines))

    def _http(self) -> None:
        self.requests = self._counter("http_requests", "HTTP requests answered", "route", "status")
        self._by_outcome: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.request_seconds = self._seconds("http_request_seconds", "Time to the end of the answer", "route")
        self.running_requests = self._gauge("running_requests", "Requests to models and topologies under way")

    def _choices(self) -> None:
        self.model_choices = self._counter("model_choices", "Models chosen for `auto`", "model", "policy", "why")
        self.model_choice_seconds = self._seconds("model_choice_seconds", "Time of one choice, predictions included")
        self.steps_chosen = self._counter(
            "steps_chosen", "Steps chosen by rules, ends included", "target", "after", "rule", "step"
        )
        self.recorded_lines = self._counter("recorded_lines", "Lines of trace files, by what became of them", "outcome")

    def _agents(self) -> None:
        self.agents_started = self._counter("agents_started", "Agents started", "model")
        self.agents_finished = self._counter("agents_finished", "Agents that finished", "model", "reason")
        self.agents_failed = self._counter("agents_failed", "Agents that failed", "model", "dropped")
        self.agents_passed_on = self._counter("agents_passed_on", "Agents that passed an agreed output on", "model")
        self.agents_stopped = self._counter("agents_stopped", "Agents cut off", "model", "why")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished agents", "model")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Those found cached by the real request", "model")
        self.completion_tokens = self._counter("completion_tokens", "Tokens decoded by finished agents", "model")
        self.wasted_tokens = self._counter("wasted_tokens", "Tokens decoded by agents cut off later", "model", "why")

    def _prefill(self) -> None:
        self.increments = self._counter("prefill_increments", "Prefill-only updates ended", "model")
        self.increment_seconds = self._seconds("prefill_increment_seconds", "Time of one prefill-only update", "model")
        self.increment_new_tokens = self._counter("prefill_new_tokens", "Tokens computed by updates", "model")
        self.increment_cached_tokens = self._counter("prefill_cached_tokens", "Tokens updates found cached", "model")
        self.increment_resident_tokens = self._counter(
            "prefill_resident_tokens", "Tokens earlier updates of the same prompt had prefilled", "model"
        )
        self.retokenized_tokens = self._counter(
            "retokenized_tokens",
            "Resident tokens an update did not find cached: evicted or tokenized anew",
            "model",
        )

    def _runs(self) -> None:
        self.first_token_seconds = self._seconds("first_token_seconds", "Time to the root's first token", "target")
        self.run_seconds = self._seconds("run_seconds", "Time from a run's start to its end", "target", "outcome")
        self.degraded = self._counter(
            "degraded", "Times a run went on without what only makes it faster", "target", "what"
        )

    def _gate(self) -> None:
        self.gate_decisions = self._counter("gate_decisions", "Times the early-exit gate scored", "target", "exited")
        self.gate_seconds = self._seconds("gate_seconds", "Time of one scoring, embedding included", "target")
        self.gate_confidence = self._share("gate_confidence", "Confidence C of scored clusters", "target")
        self.gate_agreement = self._share("gate_agreement", "Weighted agreement P of scored clusters", "target")
        self.gate_probability = self._share("gate_probability", "Exit probability Q of scored clusters", "target")

    def _batches(self) -> None:
        self.batches_ended = self._counter("batches_ended", "Batches that ended", "status")
        self.batch_lines = self._counter("batch_lines", "Lines of batches with a result", "outcome")
        self.running_batch_lines = self._gauge("running_batch_lines", "Lines of batches under way")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, meaning, labels, registry=self.registry)

    def _seconds(self, name: str, meaning: str, *labels: str) -> Histogram:
        return self._histogram(name, meaning, labels, SECONDS)

    def _share(self, name: str, meaning: str, *labels: str) -> Histogram:
        return self._histogram(name, meaning, labels, SHARES)

    def _histogram(self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, meaning, labels, buckets=buckets, registry=self.registry)

    def http_request_ended(self, route: str, status: int, took_s: float) -> None:
        """Count one HTTP request; `route` is the route's pattern, never a client's path."""
        counted = self._by_outcome.get((route, status))
        if counted is None:
            series = self.requests.labels(route, str(status)), self.request_seconds.labels(route)
            counted = self._by_outcome.setdefault((route, status), series)
        requests, seconds = counted
        requests.inc()
        seconds.observe(took_s)
