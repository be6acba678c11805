"""Runs one request through a topology's steps, one after the other, as its rules choose (CoServe,
section 2.1).
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shell_router.core.engine import NO_OPTIONS, UNSTREAMED_INTERVAL, ServedModel
from shell_router.core.events import Degraded, Emit, Event, StepChosen
from shell_router.core.predictors import Embedder, Prospect, TokenStates
from shell_router.core.sampling import require_possible
from shell_router.errors import ConfigError, DeadlineExceeded, EngineError, InvalidField
from shell_router.moa.choosing import ModelChooser
from shell_router.moa.deadline import Deadline
from shell_router.moa.prompt import encode_text
from shell_router.moa.requests import Answer, MoaRequest
from shell_router.moa.thinking import make_no_answer_error
from shell_router.topology import Conditional, Step, Topology
from shell_router.topology.rules import (
    END,
    START,
    Classed,
    Classifier,
    Facts,
    Rule,
    Transition,
    Unclassified,
    Unscored,
    choose,
)

log = logging.getLogger(__name__)

Vectors = NDArray[np.float32]
READ_CHARACTERS = 2048
"""A text is classified by its beginning: the request waits while a CPU takes 0.05 to 0.2 s for
1,000.
"""
KEPT_CLASSIFIERS = 256
"""Classifiers whose embedded examples are kept; those asked longest ago are forgotten first."""
AT_ONCE = 16
"""Examples that are embedded together. An embedder's time for an answer counts from when it is
asked: the last of a thousand would be too late."""


class Walk:
    """One request on its way through the steps of `topology`, and what is known of it.

    The choice of the first step waits for the first event of its run: a stream's head goes out with
    the first event, and until then a request can be refused with a status. `run` runs a step.
    """

    def __init__(
        self,
        run: Callable[[Topology, MoaRequest, Emit], Awaitable[Answer]],
        chooser: ModelChooser,
        models: Mapping[str, ServedModel],
        classes: "Classes",
        topology: Conditional,
        request: MoaRequest,
        emit: Emit,
    ) -> None:
        if request.offer is not None and any(
            step.may_be_last and not step.is_last for step in topology.steps.values()
        ):
            raise InvalidField(
                f"{topology.name!r} has steps that another may follow, which call no tools.",
                field="tools",
                remedy="Ask a topology whose answering steps are always the last.",
            )
        self._topology = topology
        self._request = request
        self._emit = emit
        self._run = run
        self._chooser = chooser
        self._models = models
        self._classes = classes
        self._clock = chooser.clock
        self._held: list[Event] | None = []  # None once the first step has begun
        self._facts = Facts(request.labels, request.question)
        self._answers: dict[str, Answer] = {}

    async def answer(self) -> Answer:
        """The output of the last step; usage of all steps that ran."""
        limit_s = self._request.timeout_s
        late = f"{self._topology.name!r} gave no answer within {limit_s:g} s."
        remedy = "Allow more time, or ask a topology with fewer steps."
        with Deadline(limit_s, late=partial(DeadlineExceeded, late, remedy=remedy)):
            step = await self._next(START, self._topology.start)
            assert step is not None, "the start leads to a step"
            while True:
                answer = self._answers[step.id] = await self._asked(step)
                # what was said of the output before is void
                classes = {
                    asked: said
                    for asked, said in self._facts.classes.items()
                    if asked[1] == "request"
                }
                self._facts = replace(
                    self._facts, output=answer.text, confidence=answer.confidence, classes=classes
                )
                following = await self._next(step.id, step.then)
                if following is None:
                    usage = {
                        agent: spent
                        for one in self._answers.values()
                        for agent, spent in one.agents.items()
                    }
                    return replace(answer, agents=usage)
                if answer.reasoning and not answer.text:
                    raise make_no_answer_error(step.root, answer.agents[step.root].reasoning_tokens)
                step = following

    async def _next(self, after: str, rules: Sequence[Rule]) -> Step | None:
        started_s = self._clock()
        choice = await self._choice(rules)
        if choice.go == END:
            step = None
        else:
            step = self._topology.steps[choice.go]
        if step is not None:
            root = step.root
            held = None
        # the last step's agent has answered; its answer was held back if another step could have
        # followed
        else:
            last = self._topology.steps[after]
            root = last.root
            held = None if last.is_last else self._answers[after]
        if held is not None:
            said = (held.text, held.reasoning)
        else:
            said = ("", "")
        self._hold(
            StepChosen(
                self._clock(), started_s, after, choice.go, root, choice.rule, choice.why, *said
            )
        )
        return step

    def _hold(self, event: Event) -> None:
        if self._held is None:
            self._emit(event)
        else:
            self._held.append(event)

    def _of_agents(self, event: Event) -> None:
        held = self._held
        self._held = None
        for one in held or ():
            self._emit(one)
        self._emit(event)

    # --- what is next

    async def _choice(self, rules: Sequence[Rule]) -> Transition:
        """What the first of `rules` that holds leads to.

        Raises ConfigError if the deployment lacks the classifier's embedder or the predictor. If
        one of them fails, the rules in question do not hold; a warning and an event say so.
        """
        while True:
            # a pattern may have to be compiled, or the text be long
            if any(rule.when is not None and rule.when.matches for rule in rules):
                found = await asyncio.to_thread(choose, rules, self._facts)
            else:
                found = choose(rules, self._facts)
            match found:
                case Transition():
                    return found
                case Unclassified():
                    said = {
                        **self._facts.classes,
                        (found.classifier, found.of): await self._classed(found),
                    }
                    self._facts = replace(self._facts, classes=said)
                case Unscored():
                    self._facts = replace(self._facts, scores=await self._scored())

    async def _classed(self, asked: Unclassified) -> Classed | None:
        topology = self._topology
        text = self._facts.text(asked.of)
        try:
            return await self._classes.of(
                topology.name, topology.classifiers[asked.classifier], text
            )
        except (EngineError, ValueError) as error:  # ValueError: what it said is no embedding
            self._degraded("classifier", str(error))
            return None

    async def _scored(self) -> Mapping[str, float]:
        """The chances of the models that rules ask for. Those that no predictor knows are
        missing."""
        name = self._topology.name
        models = self._topology.scored_models
        chooser = self._chooser
        question = self._request.question
        if not chooser.predicts:
            raise ConfigError(
                f"Topology {name!r} asks how probably {' or '.join(models)} would be right,"
                " and no predictor is configured.",
                remedy="Set `prediction.scores` in the configuration, or remove `score_below`.",
            )
        require_possible(
            len(question), max(model.context_length for model in self._models.values())
        )
        if question:
            tokens = len(await encode_text(self._models[models[0]].tokenizer, question))
        else:
            tokens = 0
        reported: list[Event] = []
        asked = Prospect(name, "rules", question, 0, tokens, tokens, tuple(models), scored=True)
        (found,) = await chooser.forecast([asked], reported.append)
        for event in reported:
            self._hold(event)
        if not reported and (unknown := [model for model in models if model not in found.scores]):
            self._degraded("scores", f"the router does not know {', '.join(unknown)}")
        return found.scores

    def _degraded(self, what: Literal["classifier", "scores"], why: str) -> None:
        log.warning("%s: no rule that asks the %s holds: %s", self._topology.name, what, why)
        self._hold(Degraded(self._clock(), "", what, why))

    # --- a step

    async def _asked(self, step: Step) -> Answer:
        given = tuple((one, self._answers[one].text) for one in step.reads if one in self._answers)
        topology = step.topology
        if given:
            agent = replace(topology.root, given=given)
            topology = replace(topology, agents={agent.id: agent})
        return await self._run(topology, self._request_to(step), self._of_agents)

    def _request_to(self, step: Step) -> MoaRequest:
        """The client's own sampling is for answers; a step that cannot give one takes its seed
        alone.

        Its id is numbered, as engines abort every request whose id begins with the given one.
        """
        asked = self._request
        number = len(self._answers)
        return replace(
            asked,
            id=f"{asked.id}.{number}",
            sampling=_sampling(step, asked.sampling),
            confidence=step.reads_confidence,
            prediction=asked.prediction if step.may_be_last else "",
            chat_template_kwargs=asked.chat_template_kwargs if step.may_be_last else NO_OPTIONS,
            max_thinking_tokens=asked.max_thinking_tokens if step.may_be_last else None,
            offer=asked.offer if step.is_last else None,
        )


def _sampling(step: Step, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the step's root is asked with in addition to its own parameters."""
    if step.is_last:
        return asked
    if step.may_be_last:
        wanted = asked
    else:
        wanted = {name: value for name, value in asked.items() if name == "sampling_seed"}
    return {
        "stream_interval": step.topology.root.sampling.get("stream_interval", UNSTREAMED_INTERVAL),
        **wanted,
    }


class Classes:
    """Asks classifiers. The examples of each are embedded when it is first asked."""

    def __init__(self, embedder: Embedder | None) -> None:
        self._embedder = embedder
        self._examples: OrderedDict[tuple[str, str], tuple[Classifier, dict[str, Vectors]]] = (
            OrderedDict()
        )
        self._turn = asyncio.Lock()

    async def of(self, topology: str, classifier: Classifier, text: str) -> Classed:
        """The class of `text`, judged by its first READ_CHARACTERS, by a classifier of this
        topology.

        Raises EngineError where the embedder fails, ConfigError where there is none.
        """
        embedder = self._embedder
        if embedder is None:
            raise ConfigError(
                (
                    f"Topology {topology!r} asks the classifier {classifier.id!r}, but no embedder "
                    "is configured."
                ),
                remedy="Set `embedder` in the configuration, or remove the classifier.",
            )
        async with (
            self._turn
        ):  # so that examples are embedded once, however many requests come at first
            key = topology, classifier.id
            asked, known = self._examples.get(key, (classifier, {}))
            if asked != classifier:  # the topology has changed
                known = {}
            self._examples[key] = classifier, known
            self._examples.move_to_end(key)
            if len(self._examples) > KEPT_CLASSIFIERS:
                self._examples.popitem(last=False)
            await _learn(embedder, classifier, known)
        return nearest(
            direction(await embedder.embed(text[:READ_CHARACTERS])),
            known,
            classifier.min_similarity,
        )


def direction(states: TokenStates) -> Vectors:
    """The mean of a text's token states as a vector of length 1, [features]; of length 0 where the
    mean is.
    """
    mean = states.mean(axis=0)
    length = float(np.linalg.norm(mean))
    return np.asarray(mean / length if length else mean, dtype=np.float32)


def nearest(
    text: Vectors, examples: Mapping[str, Vectors], min_similarity: float = -1.0
) -> Classed:
    """The class of the example with the highest cosine similarity to `text`; of equals, the one
    named first.

    `text` is [features], `examples` are [examples, features] by class, all of length 1.
    """
    found = [Classed(name, float((vectors @ text).max())) for name, vectors in examples.items()]
    best = max(found, key=lambda classed: classed.similarity)
    if best.similarity >= min_similarity:
        return best
    return Classed("", best.similarity)


async def _learn(embedder: Embedder, classifier: Classifier, known: dict[str, Vectors]) -> None:
    """Embed the examples that are not `known` yet, which are all unless an earlier request failed
    or was left.
    """
    for name, texts in classifier.examples.items():
        for begin in range(len(known.get(name, ())), len(texts), AT_ONCE):
            rows = await _embedded(embedder, texts[begin : begin + AT_ONCE])
            known[name] = np.vstack([known[name], rows]) if name in known else rows


async def _embedded(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    """[texts, features]. Where one fails, none is left at work."""
    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(embedder.embed(text)) for text in texts]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__
    return np.stack([direction(one.result()) for one in asked])
