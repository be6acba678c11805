"""Events as JSON objects, and many waiting token events as one."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
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

KINDS: dict[type, str] = {
    ModelChosen: "chosen",
    StepChosen: "step",
    AgentStarted: "started",
    PrefillIncrement: "prefill",
    PromptReady: "ready",
    AgentPlaced: "placed",
    AgentTokens: "tokens",
    AgentFinished: "finished",
    AgentPassedOn: "passed_on",
    ExitScored: "exit",
    AgentStopped: "stopped",
    AgentErred: "failed",
    Degraded: "degraded",
}
_FIELDS = {kind: tuple(one.name for one in fields(kind)) for kind in KINDS}
_TIMES = ("at_s", "started_s")


def facts(event: Event, origin_s: float) -> dict[str, Any]:
    """The event's fields; times become seconds since `origin_s`."""
    named = {name: getattr(event, name) for name in _FIELDS[type(event)]}
    for time in _TIMES:
        if time in named:
            named[time] = round(named[time] - origin_s, 6)
    return named


def coalesced(events: Iterable[Event]) -> Iterator[Event]:
    """The same events with an agent's neighbouring tokens joined; tokens never pass another kind of event."""
    waiting: dict[str, list[AgentTokens]] = {}
    for event in events:
        if isinstance(event, AgentTokens):
            waiting.setdefault(event.agent, []).append(event)
        else:
            yield from _joined(waiting)
            waiting.clear()
            yield event
    yield from _joined(waiting)


def _joined(waiting: dict[str, list[AgentTokens]]) -> Iterator[AgentTokens]:
    for agent, pieces in waiting.items():
        if len(pieces) == 1:
            yield pieces[0]
        else:
            ids = tuple(token for piece in pieces for token in piece.ids)
            yield AgentTokens(pieces[-1].at_s, agent, ids, "".join(piece.text for piece in pieces))
