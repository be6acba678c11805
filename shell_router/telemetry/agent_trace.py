"""What one agent did, gathered from its events, and its spans."""

from dataclasses import asdict, dataclass, field
from typing import Any

from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    AgentPassedOn,
    AgentPlaced,
    AgentStopped,
    AgentTokens,
    PrefillIncrement,
    PromptReady,
)
from shell_router.telemetry.overlap import PrefillTimes, prefill_times

End = AgentFinished | AgentPassedOn | AgentStopped | AgentErred


@dataclass(slots=True)
class AgentTrace:
    """One agent's events, its tokens only counted. Times are the run's clock, in seconds."""

    model: str
    started_s: float
    increments: list[PrefillIncrement] = field(default_factory=list)
    ready: PromptReady | None = None
    placed: AgentPlaced | None = None
    first_token_s: float | None = None
    tokens: int = 0
    end: End | None = None

    def add_tokens(self, event: AgentTokens) -> None:
        """Count decoded tokens."""
        if self.first_token_s is None:
            self.first_token_s = event.at_s
        self.tokens += len(event.ids)

    @property
    def state(self) -> str:
        """running, finished, passed_on, early_exit, unneeded or failed: the words of AgentUsage."""
        match self.end:
            case None:
                return "running"
            case AgentFinished():
                return "finished"
            case AgentPassedOn():
                return "passed_on"
            case AgentStopped(why=why):
                return why
            case AgentErred():
                return "failed"

    @property
    def confidence(self) -> float | None:
        """Geometric mean token probability of the output, where measured."""
        return self.end.confidence if isinstance(self.end, AgentFinished | AgentPassedOn) else None

    def prefill_times(self, inputs_done_s: float) -> PrefillTimes | None:
        """Hidden and exposed prefill, once the first token is there."""
        if self.first_token_s is None:
            return None
        updates = ((one.started_s, one.at_s) for one in self.increments)
        return prefill_times(updates, inputs_done_s, self.first_token_s)

    def as_json(self, origin_s: float) -> dict[str, Any]:
        """Facts and spans; times are seconds since `origin_s`."""
        facts: dict[str, Any] = {
            "model": self.model,
            "state": self.state,
            "started_s": since(self.started_s, origin_s),
            "decoded_tokens": self.tokens,
        }
        if self.placed is not None:
            facts["engines"] = [asdict(one) for one in self.placed.placed]
        return facts | self._outcome(origin_s) | {"spans": self._spans(origin_s)}

    def _outcome(self, origin_s: float) -> dict[str, Any]:
        if self.end is None:
            return {}
        ended = {"ended_s": since(self.end.at_s, origin_s)}
        match self.end:
            case AgentFinished() as end:
                return ended | {
                    "reason": end.reason,
                    "prompt_tokens": end.prompt_tokens,
                    "completion_tokens": end.completion_tokens,
                    "cached_tokens": end.cached_tokens,
                    "confidence": end.confidence,
                }
            case AgentPassedOn() as end:
                return ended | {"source": end.source, "confidence": end.confidence}
            case AgentErred() as end:
                return ended | {"error": end.error, "dropped": end.dropped}
            case AgentStopped():
                return ended

    def _spans(self, origin_s: float) -> list[dict[str, Any]]:
        spans = [
            span("queue", self.started_s, self._left_queue_s),
            *(self._increment_span(one) for one in self.increments),
            self._prefill_span(),
            span("decode", self.first_token_s, self.end.at_s if self.end else None) | {"tokens": self.tokens},
        ]
        return [shifted(one, origin_s) for one in spans if one["start_s"] is not None]

    @property
    def _left_queue_s(self) -> float | None:
        """When its first request went out; one that never asked for anything waited to its end."""
        if self.increments:
            return min(one.started_s for one in self.increments)
        last = self.ready or self.end
        return last.at_s if last else None

    def _prefill_span(self) -> dict[str, Any]:
        """The real request, from when it was sent to its first token."""
        if self.ready is None:
            return span("prefill", None, None)
        cached = self.end.cached_tokens if isinstance(self.end, AgentFinished) else None
        tokens = {"prompt_tokens": self.ready.prompt_tokens, "cached_tokens": cached}
        return span("prefill", self.ready.at_s, self.first_token_s) | tokens

    @staticmethod
    def _increment_span(one: PrefillIncrement) -> dict[str, Any]:
        return span("prefill_increment", one.started_s, one.at_s) | {
            "slot": one.slot,
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "resident_tokens": one.resident_tokens,
        }


def span(name: str, start_s: float | None, end_s: float | None) -> dict[str, Any]:
    """One span; an end not yet known is None."""
    return {"name": name, "start_s": start_s, "end_s": end_s}


def shifted(one: dict[str, Any], origin_s: float) -> dict[str, Any]:
    """The span with its times counted from `origin_s`."""
    end_s = one["end_s"]
    return one | {
        "start_s": since(one["start_s"], origin_s),
        "end_s": None if end_s is None else since(end_s, origin_s),
    }


def since(at_s: float, origin_s: float) -> float:
    """Seconds from `origin_s` to `at_s`, to the microsecond."""
    return round(at_s - origin_s, 6)
