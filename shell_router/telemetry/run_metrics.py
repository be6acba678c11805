"""Counts one run's events into the metrics."""

from collections.abc import Callable, Collection
from typing import Any

from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    AgentPassedOn,
    AgentPlaced,
    AgentStarted,
    AgentStopped,
    AgentTokens,
    Degraded,
    Event,
    ExitScored,
    ModelChosen,
    PrefillIncrement,
    PromptReady,
    StepChosen,
)
from shell_router.telemetry.metrics import Metrics


class RunMetrics:
    """Observes one run of `target` (a topology's name or a model's alias); tokens of `answering` agents are its answer.

    Events name only the agent; which model it runs and how much it has decoded is remembered here.
    """

    def __init__(self, metrics: Metrics, target: str, answering: Collection[str], started_s: float) -> None:
        self._metrics = metrics
        self._target = target
        self._answering = answering
        self._started_s = started_s
        self._answered = False
        self._models: dict[str, str] = {}
        self._decoded: dict[str, int] = {}
        self._counted_by: dict[type, Callable[[Any], None]] = {
            ModelChosen: self._chosen,
            StepChosen: self._step,
            AgentStarted: self._agent_started,
            AgentTokens: self._tokens,
            AgentFinished: self._finished,
            AgentPassedOn: self._passed_on,
            AgentStopped: self._stopped,
            AgentErred: self._erred,
            PrefillIncrement: self._increment,
            PromptReady: lambda event: None,
            AgentPlaced: lambda event: None,  # dispatchers count their choices themselves
            ExitScored: self._scored,
            Degraded: self._degraded,
        }

    def observe(self, event: Event) -> None:
        """Count `event`."""
        self._counted_by[type(event)](event)

    def ended(self, at_s: float, outcome: str) -> None:
        """Record the run's length; `outcome` is finished, failed or cancelled."""
        self._metrics.run_seconds.labels(self._target, outcome).observe(at_s - self._started_s)

    def _model(self, agent: str) -> str:
        return self._models.get(agent, "unknown")

    def _chosen(self, event: ModelChosen) -> None:
        self._metrics.model_choices.labels(event.model, event.policy, event.why).inc()
        self._metrics.model_choice_seconds.observe(event.at_s - event.started_s)

    def _agent_started(self, event: AgentStarted) -> None:
        self._models[event.agent] = event.model
        self._metrics.agents_started.labels(event.model).inc()

    def _tokens(self, event: AgentTokens) -> None:
        self._decoded[event.agent] = self._decoded.get(event.agent, 0) + len(event.ids)
        if event.agent in self._answering:
            self._first_tokens(event.at_s)

    def _step(self, event: StepChosen) -> None:
        self._metrics.steps_chosen.labels(self._target, event.after, str(event.rule), event.step).inc()
        if event.text:
            self._first_tokens(event.at_s)

    def _first_tokens(self, at_s: float) -> None:
        if not self._answered:
            self._answered = True
            self._metrics.first_token_seconds.labels(self._target).observe(at_s - self._started_s)

    def _finished(self, event: AgentFinished) -> None:
        model = self._model(event.agent)
        self._metrics.agents_finished.labels(model, event.reason).inc()
        self._metrics.prompt_tokens.labels(model).inc(event.prompt_tokens)
        self._metrics.cached_tokens.labels(model).inc(event.cached_tokens)
        self._metrics.completion_tokens.labels(model).inc(event.completion_tokens)

    def _passed_on(self, event: AgentPassedOn) -> None:
        self._metrics.agents_passed_on.labels(self._model(event.agent)).inc()
        if event.agent in self._answering:
            self._first_tokens(event.at_s)

    def _stopped(self, event: AgentStopped) -> None:
        model = self._model(event.agent)
        self._metrics.agents_stopped.labels(model, event.why).inc()
        self._metrics.wasted_tokens.labels(model, event.why).inc(self._decoded.get(event.agent, 0))

    def _erred(self, event: AgentErred) -> None:
        self._metrics.agents_failed.labels(self._model(event.agent), str(event.dropped).lower()).inc()

    def _increment(self, event: PrefillIncrement) -> None:
        model = self._model(event.agent)
        metrics = self._metrics
        metrics.increments.labels(model).inc()
        metrics.increment_seconds.labels(model).observe(event.at_s - event.started_s)
        metrics.increment_new_tokens.labels(model).inc(event.prompt_tokens - event.cached_tokens)
        metrics.increment_cached_tokens.labels(model).inc(event.cached_tokens)
        metrics.increment_resident_tokens.labels(model).inc(event.resident_tokens)
        metrics.retokenized_tokens.labels(model).inc(max(0, event.resident_tokens - event.cached_tokens))

    def _degraded(self, event: Degraded) -> None:
        self._metrics.degraded.labels(self._target, event.what).inc()

    def _scored(self, event: ExitScored) -> None:
        metrics, target = self._metrics, self._target
        metrics.gate_decisions.labels(target, str(event.exited).lower()).inc()
        metrics.gate_seconds.labels(target).observe(event.at_s - event.started_s)
        metrics.gate_confidence.labels(target).observe(event.confidence)
        metrics.gate_agreement.labels(target).observe(event.agreement)
        metrics.gate_probability.labels(target).observe(event.probability)
