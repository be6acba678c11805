"""Runs one request through a topology's steps, as its rules choose (CoServe, section 2.1)."""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shell_router.core.engine import NO_OPTIONS, UNSTREAMED_INTERVAL
from shell_router.core.events import Degraded, Emit, Event, StepChosen
from shell_router.core.exact_json import Values
from shell_router.core.predictors import Embedder, TokenStates
from shell_router.errors import (
    AgentFailed,
    BudgetExceeded,
    ConfigError,
    EngineError,
    InvalidField,
    PromptRefused,
)
from shell_router.moa.choosing import ModelChooser
from shell_router.moa.expectations import ForecastQuery, KnownPrompt
from shell_router.moa.requests import AgentUsage, Answer, FanOut, MoaRequest
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
1,000 characters.
"""
KEPT_CLASSIFIERS = 256
"""Classifiers whose embedded examples are kept; the least recently used are forgotten first."""
AT_ONCE = 16
"""Examples that are embedded together. An embedder's time limit counts from the request: the last
of a thousand would be too late.
"""

# a pool of its own: slow patterns must not starve the other uses of asyncio's default executor
_POOL = ThreadPoolExecutor(2, thread_name_prefix="rules")


class Walk:
    """One request on its way through the steps of a topology, and the facts that rules may read.

    The choice of the first step is held back until the first event of its run: a stream's head goes
    out with the first event, and until then a request can be refused with a status.
    """

    def __init__(
        self,
        run: Callable[[Topology, MoaRequest, Emit], Awaitable[Answer]],
        chooser: ModelChooser,
        classes: "Classes",
        topology: Conditional,
        request: MoaRequest,
        emit: Emit,
    ) -> None:
        """Prepare the walk; `run` runs one step. Raises InvalidField for tools no step may call."""
        if request.offer is not None:
            for step in topology.steps.values():
                if step.id in topology.may_answer and not step.is_last:
                    raise InvalidField(
                        f"{topology.name!r} may answer with a step that another step can follow; "
                        "such a step calls no tools.",
                        field="tools",
                        remedy="Ask a topology whose answering steps are always the last.",
                    )
        self._topology = topology
        self._request = request
        self._emit = emit
        self._run = run
        self._chooser = chooser
        self._classes = classes
        self._clock = chooser.clock
        self._held: list[Event] | None = []  # None once the first step has begun
        self._facts = Facts(request.labels, request.question)
        self._answers: dict[str, Answer] = {}
        self._spent: dict[str, AgentUsage] = {}
        self._numbers = count()

    async def answer(self) -> Answer:
        """Return the output of the last step, with the usage of all steps that ran."""
        step = await self._begin()
        while True:
            try:
                answer = await self._attempt(step)
            except BudgetExceeded as error:
                return self._answer_unpaid(step, error)
            following = await self._choose_next(step.id, step.then)
            if following is None:
                break
            if answer is not None and answer.reasoning and not answer.text:
                tokens = answer.agents[step.root].reasoning_tokens
                raise make_no_answer_error(step.root, tokens)
            step = following
        read = FanOut(step.id, {})
        for name, earlier in self._answers.items():
            read.outputs[name] = (earlier.text, ())
        if step.is_last:
            self._request.turn.read = read
        return replace(self._answers[step.answer or step.id], agents=self._spent)

    def _answer_unpaid(self, step: Step, error: BudgetExceeded) -> Answer:
        """Return the newest output as the answer, as the budget does not pay for `step`.

        Raises BudgetExceeded if there is none.
        """
        if not self._answers:
            raise error
        name = next(reversed(self._answers))
        last = self._answers[name]
        now_s = self._clock()
        why = f"the budget does not pay for {step.id}"
        root = self._topology.steps[name].root
        self._hold(StepChosen(now_s, now_s, name, END, root, 0, why, last.text, last.reasoning))
        warning = f"The budget left {step.id!r} no money: {name!r} answers in its place."
        agents = {**self._spent, **error.spent}
        return replace(last, reason="length", agents=agents, calls=(), warning=warning)

    async def _begin(self) -> Step:
        """Return the first step; in a turn whose earlier steps are kept, the last."""
        turn = self._request.turn
        now_s = self._clock()
        for event in turn.list_stops(now_s):
            self._hold(event)
        if not turn.kept.reader:
            first = await self._choose_next(START, self._topology.start)
            assert first is not None, "the start leads to a step"
            return first
        step = self._topology.steps[turn.kept.reader]
        self._hold(StepChosen(now_s, now_s, START, step.id, step.root, 0, "kept"))
        for name, (text, _) in turn.kept.outputs.items():
            self._answers[name] = Answer(text, "stop", {})
        return step

    async def _attempt(self, step: Step) -> Answer | None:
        """Run the step; return None if it fails, and a rule says what follows then."""
        try:
            return await self._run_step(step)
        except (AgentFailed, EngineError, PromptRefused) as error:
            if not any(rule.is_for_failure for rule in step.then):
                raise
            log.warning("%s: step %s failed: %s", self._topology.name, step.id, error)
            self._facts = replace(self._facts, error=str(error))
            self._spent |= error.spent
            return None

    async def _run_step(self, step: Step) -> Answer:
        """Run the step and learn the facts that its answer gives."""
        texts = {name: answer.text for name, answer in self._answers.items()}
        outputs = [(name, texts[name]) for name in step.reads if texts.get(name, "").strip()]
        topology = step.topology
        if step.reads:
            root = replace(topology.root, given=tuple(outputs))
            if not outputs:
                root = replace(root, prompt=step.unread_prompt)
            topology = replace(topology, agents={root.id: root})
        answer = await self._run(topology, self._make_request(step), self._emit_held)
        self._answers[step.id] = answer
        self._spent |= answer.agents
        # the classes of the previous output no longer hold
        classes = {
            key: classed for key, classed in self._facts.classes.items() if key[1] == "request"
        }
        self._facts = replace(
            self._facts, output=answer.text, confidence=answer.confidence, classes=classes, error=""
        )
        return answer

    def _make_request(self, step: Step) -> MoaRequest:
        """Return the request for one step.

        The client's sampling is for answers; a step that cannot give the answer takes only its
        seed. Ids are numbered, as engines abort all requests whose id begins with an aborted one.
        """
        request = self._request
        may_answer = step.id in self._topology.may_answer
        messages = request.messages
        if self._topology.keeps_proposals and not may_answer:
            messages = request.turn_messages
        return replace(
            request,
            id=f"{request.id}.{next(self._numbers)}",
            messages=messages,
            sampling=_merge_sampling(step, request.sampling, may_answer=may_answer),
            confidence=step.reads_confidence,
            prediction=request.prediction if may_answer else "",
            chat_template_kwargs=request.chat_template_kwargs if may_answer else NO_OPTIONS,
            max_thinking_tokens=request.max_thinking_tokens if may_answer else None,
            offer=request.offer if step.is_last else None,
        )

    async def _choose_next(self, after: str, rules: Sequence[Rule]) -> Step | None:
        """Return the step after `after`, None at the end, and report the choice."""
        started_s = self._clock()
        choice = await self._apply_rules(rules)
        step = None
        text = ""
        reasoning = ""
        if choice.go != END:
            step = self._topology.steps[choice.go]
            root = step.root
        else:
            last = self._topology.steps[after]
            answering = last.answer or after
            root = self._topology.steps[answering].root
            # the answer was held back if another step could have followed
            if not last.is_last:
                text = self._answers[answering].text
                reasoning = self._answers[answering].reasoning
        self._hold(
            StepChosen(
                self._clock(),
                started_s,
                after,
                choice.go,
                root,
                choice.rule,
                choice.why,
                text,
                reasoning,
            )
        )
        return step

    def _hold(self, event: Event) -> None:
        """Emit the event; before the first step's first event, keep it until then."""
        if self._held is None:
            self._emit(event)
        else:
            self._held.append(event)

    def _emit_held(self, event: Event) -> None:
        """Emit an event of a step, and before it all events that were held."""
        held = self._held or ()
        self._held = None
        for earlier in held:
            self._emit(earlier)
        self._emit(event)

    # --- rules

    async def _apply_rules(self, rules: Sequence[Rule]) -> Transition:
        """Return the transition of the first rule that holds.

        If an embedder or predictor fails, the rules that need it do not hold; a warning and an
        event say so.

        Raises:
            ConfigError: The deployment lacks the classifier's embedder or the predictor.
        """
        # a pattern may have to be compiled, or the text be long
        matches = any(rule.when is not None and rule.when.matches for rule in rules)
        while True:
            if matches:
                choice = await _choose_off_loop(rules, self._facts)
            else:
                choice = choose(rules, self._facts)
            match choice:
                case Transition():
                    return choice
                case Unclassified():
                    classes = dict(self._facts.classes)
                    classes[choice.classifier, choice.of] = await self._classify(choice)
                    self._facts = replace(self._facts, classes=classes)
                case Unscored():
                    self._facts = replace(self._facts, scores=await self._score())

    async def _classify(self, unclassified: Unclassified) -> Classed | None:
        """Return the class that rules ask for, None if the embedder fails."""
        topology = self._topology
        text = self._facts.text(unclassified.of)
        classifier = topology.classifiers[unclassified.classifier]
        try:
            return await self._classes.classify(topology.name, classifier, text)
        except (EngineError, ValueError) as error:  # ValueError: this is no embedding
            self._degrade("classifier", str(error))
            return None

    async def _score(self) -> Mapping[str, float]:
        """Return the predicted scores of the models that rules name, as far as they are known."""
        name = self._topology.name
        models = self._topology.scored_models
        question = self._request.question
        if not self._chooser.predicts:
            raise ConfigError(
                f"Topology {name!r} asks how probably {' or '.join(models)} would be right,"
                " and no predictor is configured.",
                remedy="Set `prediction.scores` in the configuration, or remove `score_below`.",
            )
        self._chooser.require_possible(len(question))
        reported: list[Event] = []
        prompt = KnownPrompt("", question, "")
        query = ForecastQuery(name, "rules", prompt, tuple(models), scored=True)
        (forecast,) = await self._chooser.forecast([query], reported.append)
        for event in reported:
            self._hold(event)
        unknown = [model for model in models if model not in forecast.scores]
        if unknown and not reported:
            self._degrade("scores", f"the router does not know {', '.join(unknown)}")
        return forecast.scores

    def _degrade(self, what: Literal["classifier", "scores"], why: str) -> None:
        log.warning("%s: no rule that asks the %s holds: %s", self._topology.name, what, why)
        self._hold(Degraded(self._clock(), "", what, why))


def _merge_sampling(step: Step, sampling: Values, *, may_answer: bool) -> Values:
    """Return the client's parameters that a step's root gets."""
    if step.is_last:
        return sampling
    if not may_answer:
        sampling = {name: value for name, value in sampling.items() if name == "sampling_seed"}
    interval = step.topology.root.sampling.get("stream_interval", UNSTREAMED_INTERVAL)
    return {"stream_interval": interval, **sampling}


async def _choose_off_loop(
    rules: Sequence[Rule], facts: Facts
) -> Transition | Unclassified | Unscored:
    """Return the choice of a thread, which stops before the next rule once this is cancelled."""
    is_left = threading.Event()
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_POOL, choose, rules, facts, is_left.is_set)
    except asyncio.CancelledError:
        is_left.set()
        raise


class Classes:
    """Asks classifiers; the examples of each are embedded when it is first asked."""

    def __init__(self, embedder: Embedder | None) -> None:
        self._embedder = embedder
        self._examples: OrderedDict[tuple[str, str], tuple[Classifier, dict[str, Vectors]]] = (
            OrderedDict()
        )
        self._turn = asyncio.Lock()

    async def classify(self, topology: str, classifier: Classifier, text: str) -> Classed:
        """Return the class of `text`, judged by its first READ_CHARACTERS.

        Raises:
            EngineError: The embedder failed.
            ConfigError: No embedder is configured.
        """
        embedder = self._embedder
        if embedder is None:
            raise ConfigError(
                f"Topology {topology!r} asks the classifier {classifier.id!r}, but no embedder "
                "is configured.",
                remedy="Set `embedder` in the configuration, or remove the classifier.",
            )
        async with self._turn:  # examples are embedded once, however many requests come at first
            key = topology, classifier.id
            named_classifier, examples = self._examples.get(key, (classifier, {}))
            if named_classifier != classifier:  # the topology has changed
                examples = {}
            self._examples[key] = classifier, examples
            self._examples.move_to_end(key)
            if len(self._examples) > KEPT_CLASSIFIERS:
                self._examples.popitem(last=False)
            await _embed_examples(embedder, classifier, examples)
        vector = compute_direction(await embedder.embed(text[:READ_CHARACTERS]))
        return find_nearest(vector, examples, classifier.min_similarity)


def compute_direction(states: TokenStates) -> Vectors:
    """Return the mean of a text's token states, [features], scaled to length 1 unless it is 0."""
    mean = states.mean(axis=0)
    length = float(np.linalg.norm(mean))
    return np.asarray(mean / length if length else mean, dtype=np.float32)


def find_nearest(text: Vectors, examples: Mapping[str, Vectors], min_similarity: float) -> Classed:
    """Return the class of the example most similar to `text`; of equals, the one named first.

    Args:
        text: [features], of length 1.
        examples: [examples, features] by class, each of length 1.
        min_similarity: The least cosine similarity; below it the class is "".
    """
    classes = [Classed(name, float((vectors @ text).max())) for name, vectors in examples.items()]
    best = max(classes, key=lambda classed: classed.similarity)
    if best.similarity >= min_similarity:
        return best
    return Classed("", best.similarity)


async def _embed_examples(
    embedder: Embedder, classifier: Classifier, examples: dict[str, Vectors]
) -> None:
    """Embed the missing examples: only some if an earlier request failed or was cancelled."""
    for name, texts in classifier.examples.items():
        for begin in range(len(examples.get(name, ())), len(texts), AT_ONCE):
            rows = await _embed_texts(embedder, texts[begin : begin + AT_ONCE])
            examples[name] = np.vstack([examples[name], rows]) if name in examples else rows


async def _embed_texts(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    """Return the directions of the texts, [texts, features]; if one fails, cancel the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(embedder.embed(text)) for text in texts]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__
    return np.stack([compute_direction(task.result()) for task in tasks])
