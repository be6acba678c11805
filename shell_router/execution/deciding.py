"""Which rule of a topology with steps holds, asked of those who can tell as rules come to need them."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shell_router.core.events import Degraded, Event
from shell_router.errors import EngineError
from shell_router.execution.classifying import Classes
from shell_router.execution.requests import Answer, MoaRequest
from shell_router.execution.scoring import Scores
from shell_router.topology import Conditional
from shell_router.topology.rules import Choice, Classed, Facts, Rule, Unclassified, Unscored, choose

log = logging.getLogger(__name__)

Emit = Callable[[Event], None]
LONG_TEXT = 16_384
"""Characters; looking through more for all patterns may take milliseconds, which the event loop must not lose."""


@dataclass(frozen=True, slots=True)
class Judges:
    """Who tells what stands in no request and no output: classes, and chances of a right answer."""

    classes: Classes
    scores: Scores


class Deciding:
    """What is known of one request on its way through the steps of `topology`."""

    def __init__(
        self,
        topology: Conditional,
        request: MoaRequest,
        judges: Judges,
        emit: Emit,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._topology = topology
        self._request = request
        self._judges = judges
        self._emit = emit
        self._clock = clock
        self._facts = Facts(request.labels, request.question)

    def ended(self, answer: Answer) -> None:
        """A step has ended with this; what was said of the output before is void."""
        classes = {asked: said for asked, said in self._facts.classes.items() if asked[1] == "request"}
        self._facts = replace(self._facts, output=answer.text, confidence=answer.confidence, classes=classes)

    async def choice(self, rules: Sequence[Rule]) -> Choice:
        """What the first of `rules` that holds leads to.

        Raises ConfigError where the deployment has nobody to ask. Where who is asked fails, the rules in question do
        not hold, which is logged and told.
        """
        while True:
            found = await self._decided(rules)
            match found:
                case Choice():
                    return found
                case Unclassified():
                    said = {**self._facts.classes, (found.classifier, found.of): await self._classed(found)}
                    self._facts = replace(self._facts, classes=said)
                case Unscored():
                    self._facts = replace(self._facts, scores=await self._scored())

    async def _decided(self, rules: Sequence[Rule]) -> Choice | Unclassified | Unscored:
        if self._facts.characters > LONG_TEXT:
            return await asyncio.to_thread(choose, rules, self._facts)
        return choose(rules, self._facts)

    async def _classed(self, asked: Unclassified) -> Classed | None:
        classifier = self._topology.classifiers[asked.classifier]
        try:
            return await self._judges.classes.of(self._topology.name, classifier, self._facts.text(asked.of))
        except (EngineError, ValueError) as error:  # ValueError: what it said is no embedding
            log.warning("%s: the %s is not classified: %s", self._topology.name, asked.of, error)
            self._emit(Degraded(self._clock(), "", "classifier", str(error)))
            return None

    async def _scored(self) -> Mapping[str, float]:
        models = self._topology.scored_models
        degraded: list[Event] = []
        scores = await self._judges.scores.of(self._topology.name, self._request, models, degraded.append)
        if not degraded and (unknown := [model for model in models if model not in scores]):
            why = f"the router does not know {', '.join(unknown)}"
            log.warning("%s: no predicted scores: %s", self._topology.name, why)
            degraded.append(Degraded(self._clock(), "", "scores", why))
        for event in degraded:
            self._emit(event)
        return scores
