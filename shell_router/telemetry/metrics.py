"""The router's metrics (docs/reference/metrics.md) in one registry: from events, and of stalls."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent_cache import CacheStats
from shell_router.core import events
from shell_router.core.durations import SECONDS
from shell_router.telemetry.trace import Trace

log = logging.getLogger(__name__)

PREFIX = "shell_router_"
STALL_CHECK_S = 0.05
LONG_STALL_S = 0.1
Series = TypeVar("Series", Counter, Histogram)
SHARES = tuple(step / 10 for step in range(1, 11))


class Family(Generic[Series]):
    """A metric family that finds a series ten times faster than prometheus_client's `labels`."""

    def __init__(self, family: Series, label_names: Sequence[str]) -> None:
        self._family: Series = family
        self._label_names = label_names
        self._series: dict[tuple[str, ...], Series] = {}

    def labels(self, *values: str) -> Series:
        """Return the series with these label values."""
        series = self._series.get(values)
        if series is None:
            series = self._family.labels(*values)
            self._series[values] = series
        return series

    def drop_target(self, target: str) -> None:
        """Remove the target's series, if the family has any."""
        if self._label_names[:1] != ("target",):
            return
        for values in [values for values in self._series if values[0] == target]:
            del self._series[values]
            self._family.remove(*values)


class Metrics:
    """The metric families of runs and requests; engines.metrics has those of engines.

    A new metric is an attribute here and, if events count into it, a case in RunMetrics.observe.
    `cache` is read at every scrape.
    """

    def __init__(self, cache: CacheStats | None = None) -> None:
        self.registry = CollectorRegistry(
            support_collectors_without_names=True
        )  # as engines.metrics is
        self._routes_and_runs()
        self._files_and_logs()
        self._agents()
        self._updates()
        self._gate_and_batches()
        self.registry.register(_CacheMetrics(cache or CacheStats()))

    def _routes_and_runs(self) -> None:
        count = self._counter
        seconds = self._histogram
        self.requests = count(
            "http_requests", "HTTP answers; 499: the client left", "route", "status"
        )
        self.request_seconds = seconds(
            "http_request_seconds", "Time from arrival to the answer's end", "route"
        )
        self.running_requests = self._gauge(
            "running_requests", "Running POST and PUT requests, and what goes on after them"
        )
        self.longest_stall = self._gauge(
            "event_loop_longest_stall_seconds", "Longest stall of the last minute or two"
        )
        self.tasks = self._gauge(
            "asyncio_tasks", "asyncio tasks: as many as requests and connections need"
        )
        self.model_choices = count(
            "model_choices", "Choices for `auto` and lists", "model", "policy", "why"
        )
        self.model_choice_seconds = Histogram(
            PREFIX + "model_choice_seconds",
            "Time of one choice, predictions included",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.steps_chosen = count(
            "steps_chosen",
            "Rule `rule` of step `after` chose `step`, or `end`",
            "target",
            "after",
            "rule",
            "step",
        )
        self.first_token_seconds = seconds(
            "first_token_seconds",
            "Time to the answer's first token, or an engine's own stream's first event",
            "target",
        )
        self.run_seconds = seconds("run_seconds", "Time of a run, by outcome", "target", "outcome")
        self.degraded = count(
            "degraded",
            "What runs went on without: an update, an exit, a predictor or a judge",
            "target",
            "what",
        )

    def _files_and_logs(self) -> None:
        count = self._counter
        self.topology_reloads = count(
            "topology_reloads",
            "Reads of changed topology files: loaded, or invalid where some kept their "
            "version before",
            "outcome",
        )
        self.recorded_lines = count(
            "recorded_lines", "Lines of trace files and access logs: written or lost", "outcome"
        )
        self.log_lines_lost = Counter(
            PREFIX + "log_lines_lost",
            "Log lines that were lost, as stderr was not read",
            registry=self.registry,
        )
        self.otlp_spans = count("otlp_spans", "OpenTelemetry spans: exported or lost", "outcome")

    def _agents(self) -> None:
        count = self._counter
        model = "model"
        self.agents_started = count("agents_started", "Agents started", model)
        self.agents_finished = count(
            "agents_finished", "Agents that finished, by finish reason", model, "reason"
        )
        self.agents_failed = count(
            "agents_failed", "Failed agents; dropped: the run went on", model, "dropped"
        )
        self.aggregations_skipped = count(
            "aggregations_skipped",
            "Agents that forwarded a precursor's output: because precursors agree, or by vote",
            model,
        )
        self.agents_stopped = count(
            "agents_stopped",
            "Agents cut off: early_exit, unneeded, deadline or budget; kept, waiting: did not run",
            model,
            "why",
        )
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of finished agents", model)
        self.cached_tokens = count(
            "cached_prompt_tokens", "Prompt tokens that requests found cached", model
        )
        self.completion_tokens = count(
            "completion_tokens", "Tokens decoded by finished agents", model
        )
        self.cost_dollars = count(
            "cost_dollars", "Cost of agents' tokens by models' prices, also of those cut off", model
        )
        self.output_token_seconds = self._histogram(
            "output_token_seconds",
            "Time per output token after the first ones, of a finished agent",
            model,
        )
        self.drafted_tokens = count(
            "drafted_tokens", "Tokens that finished agents' engines drafted", model
        )
        self.accepted_tokens = count(
            "accepted_draft_tokens", "Drafted tokens that were right", model
        )
        self.wasted_tokens = count(
            "wasted_tokens", "Tokens decoded by agents cut off later", model, "why"
        )
        self.preemptions = count(
            "batch_preemptions", "Requests of batches that left their place to online ones", model
        )

    def _updates(self) -> None:
        count = self._counter
        model = "model"
        self.increments = count("prefill_increments", "Prefill-only updates that ended", model)
        self.increment_seconds = self._histogram(
            "prefill_increment_seconds", "Time of one prefill-only update", model
        )
        self.increment_new_tokens = count(
            "prefill_new_tokens", "Tokens that updates computed", model
        )
        self.increment_cached_tokens = count(
            "prefill_cached_tokens", "Tokens updates found cached", model
        )
        self.increment_resident_tokens = count(
            "prefill_resident_tokens", "Tokens that earlier updates of the prompt prefilled", model
        )
        self.retokenized_tokens = count(
            "retokenized_tokens",
            "Resident tokens that an update did not find cached: evicted or tokenized anew",
            model,
        )

    def _gate_and_batches(self) -> None:
        self.gate_decisions = self._counter(
            "gate_decisions", "Scores of the early-exit gate", "target", "exited"
        )
        self.gate_seconds = self._histogram(
            "gate_seconds", "Time of one score, embedding included", "target"
        )
        self.gate_confidence = self._histogram(
            "gate_confidence", "Confidence C of scored clusters", "target", buckets=SHARES
        )
        self.gate_agreement = self._histogram(
            "gate_agreement", "Weighted agreement P of scored clusters", "target", buckets=SHARES
        )
        self.gate_probability = self._histogram(
            "gate_probability", "Exit probability Q of scored clusters", "target", buckets=SHARES
        )
        self.batches_ended = self._counter(
            "batches_ended", "Batches that ended, by status", "status"
        )
        self.batch_lines = self._counter(
            "batch_lines", "Batch lines with a result, by outcome", "outcome"
        )
        self.pool_loads = self._histogram(
            "pool_load_seconds", "Time of one load by a worker of a batch pool", "kind"
        )
        self.pool_moved = self._counter(
            "pool_moved_prompts", "Prompts of pools moved to another worker, by why", "why"
        )
        self.running_batch_lines = self._gauge("running_batch_lines", "Running batch lines")

    def _counter(self, name: str, meaning: str, *labels: str) -> Family[Counter]:
        return Family(Counter(PREFIX + name, meaning, labels, registry=self.registry), labels)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(PREFIX + name, meaning, registry=self.registry)

    def _histogram(
        self, name: str, meaning: str, *labels: str, buckets: Sequence[float] = SECONDS
    ) -> Family[Histogram]:
        return Family(
            Histogram(PREFIX + name, meaning, labels, buckets=buckets, registry=self.registry),
            labels,
        )

    def drop_target(self, target: str) -> None:
        """Remove the series of a topology that is not served any more."""
        for family in vars(self).values():
            if isinstance(family, Family):
                family.drop_target(target)

    def count_http_request(self, route: str, status: int, took_s: float) -> None:
        """Count an HTTP request.

        Args:
            route: The route's pattern, never a client's path.
            status: The answer's status.
            took_s: Seconds from arrival to the answer's end.
        """
        self.requests.labels(route, str(status)).inc()
        self.request_seconds.labels(route).observe(took_s)


@dataclass(frozen=True, eq=False)
class _CacheMetrics(Collector):
    stats: CacheStats

    def collect(self) -> Iterator[Metric]:
        away = "1 while Redis is away and prompts are cached in memory"
        yield GaugeMetricFamily(PREFIX + "cache_degraded", away, float(self.stats.degraded))
        about = (
            "Failed reads and lost writes of Redis, malformed entries, logs withdrawn from sharing"
        )
        faults = CounterMetricFamily(PREFIX + "cache_faults", about, labels=("what",))
        for what in ("failed_reads", "lost_writes", "skipped", "withdrawn"):
            faults.add_metric((what,), getattr(self.stats, what))
        yield faults


@dataclass(slots=True, eq=False)
class RunMetrics:
    """Counts one run's events, after `trace` has taken them.

    Events name only the agent; the trace knows its model and its decoded tokens. Tokens of
    `answering` agents are the run's answer.
    """

    metrics: Metrics
    trace: Trace
    answering: Collection[str]
    answered: bool = False

    def observe(self, event: events.Event) -> None:
        """Count `event`; kinds that are not named here count nothing.

        Dispatchers count their choices themselves.
        """
        metrics = self.metrics
        target = self.trace.target
        match event:
            case events.AgentTokens() | events.AgentThought():
                self._count_written(event)
            case events.AgentStarted():
                metrics.agents_started.labels(event.model).inc()
            case events.AgentFinished():
                self._count_finished(event)
            case events.PrefillIncrement():
                self._count_increment(event)
            case events.AgentStopped():
                model = self._model(event.agent)
                tokens = self.trace.agents[event.agent].tokens
                metrics.agents_stopped.labels(model, event.why).inc()
                metrics.wasted_tokens.labels(model, event.why).inc(tokens)
            case events.AgentPreempted():
                model = self._model(event.agent)
                metrics.preemptions.labels(model).inc()
                metrics.wasted_tokens.labels(model, "preempted").inc(event.lost_tokens)
            case events.AggregationSkipped():
                metrics.aggregations_skipped.labels(self._model(event.agent)).inc()
                self._count_written(event)
            case events.AgentErred():
                metrics.agents_failed.labels(
                    self._model(event.agent), str(event.dropped).lower()
                ).inc()
            case events.ModelChosen():
                metrics.model_choices.labels(event.model, event.policy, event.why).inc()
                metrics.model_choice_seconds.observe(event.at_s - event.started_s)
            case events.StepChosen():
                # clients make the names of inline steps up
                after = "" if target == "inline" else event.after
                step = "" if target == "inline" else event.step
                metrics.steps_chosen.labels(target, after, str(event.rule), step).inc()
                if event.text:
                    self._time_first_tokens(event.at_s)
            case events.ExitScored():
                metrics.gate_decisions.labels(target, str(event.exited).lower()).inc()
                metrics.gate_seconds.labels(target).observe(event.at_s - event.started_s)
                metrics.gate_confidence.labels(target).observe(event.confidence)
                metrics.gate_agreement.labels(target).observe(event.agreement)
                metrics.gate_probability.labels(target).observe(event.probability)
            case events.Degraded():
                metrics.degraded.labels(target, event.what).inc()

    def close(self, at_s: float, outcome: str) -> None:
        """Record the run's length; `outcome` is finished, failed or cancelled."""
        self.metrics.run_seconds.labels(self.trace.target, outcome).observe(
            at_s - self.trace.started_s
        )

    def _model(self, agent: str) -> str:
        return self.trace.agents[agent].model

    def _count_finished(self, event: events.AgentFinished) -> None:
        model = self._model(event.agent)
        metrics = self.metrics
        metrics.agents_finished.labels(model, event.reason).inc()
        metrics.prompt_tokens.labels(model).inc(event.prompt_tokens)
        metrics.cached_tokens.labels(model).inc(event.cached_tokens)
        metrics.completion_tokens.labels(model).inc(event.completion_tokens)
        metrics.drafted_tokens.labels(model).inc(event.drafted_tokens)
        metrics.accepted_tokens.labels(model).inc(event.accepted_tokens)
        if (token_s := self.trace.agents[event.agent].token_s) is not None:
            metrics.output_token_seconds.labels(model).observe(token_s)

    def _count_written(
        self, event: events.AgentTokens | events.AgentThought | events.AggregationSkipped
    ) -> None:
        if not self.answered and event.agent in self.answering:
            self._time_first_tokens(event.at_s)

    def _time_first_tokens(self, at_s: float) -> None:
        if not self.answered:
            self.answered = True
            self.metrics.first_token_seconds.labels(self.trace.target).observe(
                at_s - self.trace.started_s
            )

    def _count_increment(self, event: events.PrefillIncrement) -> None:
        model = self._model(event.agent)
        metrics = self.metrics
        metrics.increments.labels(model).inc()
        metrics.increment_seconds.labels(model).observe(event.at_s - event.started_s)
        metrics.increment_new_tokens.labels(model).inc(event.prompt_tokens - event.cached_tokens)
        metrics.increment_cached_tokens.labels(model).inc(event.cached_tokens)
        metrics.increment_resident_tokens.labels(model).inc(event.resident_tokens)
        metrics.retokenized_tokens.labels(model).inc(
            max(0, event.resident_tokens - event.cached_tokens)
        )


class StallWatch:
    """Measures stalls of the event loop until `close`, by how late a timer is.

    `gauge` shows the longest stall of this minute and the one before. A stall over LONG_STALL_S is
    a defect, and is logged.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, gauge: Gauge) -> None:
        self._loop = loop
        self._longest = [0.0, 0.0]  # of this minute and the one before
        self._due_s = self._window_s = loop.time()
        gauge.set_function(lambda: max(self._longest))
        self._tick()

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = max(0.0, now_s - self._due_s)
        if now_s - self._window_s >= 60:
            self._longest = [0.0, self._longest[0]]
            self._window_s = now_s
        self._longest[0] = max(self._longest[0], late_s)
        if late_s > LONG_STALL_S:
            log.warning("the event loop was held up for %.0f ms: all requests waited", 1e3 * late_s)
        self._due_s = now_s + STALL_CHECK_S
        self._timer = self._loop.call_later(STALL_CHECK_S, self._tick)

    def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()
