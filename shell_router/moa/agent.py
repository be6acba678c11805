"""One agent of a run: what it is to do, its prompt, and its output while it is decoded."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from typing import Any

from agent_cache import Chunk, LogKey, LogWriter
from shell_router.core.drafts import MOST_SOURCE_TOKENS
from shell_router.core.engine import (
    DEFAULT_MAX_NEW_TOKENS,
    NO_HINTS,
    Finish,
    Generation,
    Hints,
    Placement,
    ServedModel,
    Tokens,
    asking_for_drafts,
    value,
)
from shell_router.core.events import (
    AgentFinished,
    AgentPlaced,
    AgentStarted,
    AgentThought,
    AgentTokens,
    AggregationSkipped,
    Emit,
    PromptReady,
)
from shell_router.core.marks import ReasoningMarks, ReasoningSplit
from shell_router.core.sampling import check_sampling, require_possible
from shell_router.core.spans import CURRENT, enter_span
from shell_router.early_exit.algorithm1 import Confidence
from shell_router.early_exit.answers import forms_in
from shell_router.errors import (
    AgentFailed,
    EngineError,
    EngineStalled,
    InvalidRequest,
    PromptTooLong,
)
from shell_router.moa.calls import CallReader, ToolCall, ToolOffer
from shell_router.moa.choosing import LatencyEstimates
from shell_router.moa.prompt import CHARACTERS_PER_TOKEN, Part, encoded
from shell_router.moa.requests import AgentUsage, Deadline
from shell_router.routing.increments import Prefilling
from shell_router.topology import Prefill, Prompt

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
FORMS = (*GRAMMARS, "stop", "stop_token_ids", "stop_regex", "min_new_tokens")
"""Sampling parameters that constrain what an output looks like."""


@value
class Source:
    """Where a slot's output comes from. `shares_ids`: the writer's ids are this model's too, and
    all of its output.
    """

    key: LogKey
    shares_ids: Callable[[], bool]


@value
class AgentTask:
    """What one agent is to do: a prompt, its slots filled from `sources`, decoded with `sampling`.

    `sampling` always holds `max_new_tokens`. `timeout_s` counts from the moment the prompt is
    complete. A slot whose precursor was aborted or failed is left out with the text around it, or,
    with `all_needed`, fails the agent. `begin_s` limits the wait for a precursor's first sign,
    `silence_s` any later one, which may be noticed up to twice as late. `hints` go with every
    request. With `drafts` the engine may draft the output from the prompt, and from `prediction`, a
    text that it is expected to repeat. With `marks` its thinking, of at most `max_thinking_tokens`,
    is no part of its output; where it `is_read`, it must come to its answer. It may call the tools
    of `offer`.
    """

    agent: str
    rid: str
    model: ServedModel
    parts: Sequence[Part]
    sampling: Mapping[str, Any]
    logprobs: bool = False
    timeout_s: float = 600.0
    hints: Hints = NO_HINTS
    sources: Mapping[str, Source] = field(default_factory=dict)
    prefill: Prefill = Prefill()
    all_needed: bool = False
    begin_s: float = 600.0
    silence_s: float = 600.0
    drafts: bool = False
    prediction: str = ""
    marks: ReasoningMarks | None = None
    max_thinking_tokens: int | None = None
    is_read: bool = True
    offer: ToolOffer | None = None


@value
class Output:
    """What an agent wrote, what the engine said at its end, and the geometric mean token
    probability if measured.

    `token_s` are seconds per token after the first ones, None where no more came.
    `reasoning` is the thinking before it, of `reasoning_tokens`, `calls` those of tools that it
    ends with.
    """

    text: str
    finish: Finish
    confidence: float | None
    token_s: float | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    calls: tuple[ToolCall, ...] = ()

    @property
    def forwarded(self) -> "Output":
        """The same as another agent's output: the thinking before it is not that agent's."""
        return replace(self, reasoning="", reasoning_tokens=0)


NOTHING = Tokens((), "")


class _Enough(Exception):
    """What a request was to decode has come before its end."""


Wrote = Callable[[str, float], bool]
"""Called with each text an agent writes and its confidence so far; returns whether the agent has
been cut off.
"""


class AgentRun:
    """Decodes one task. `text`, `prompt_tokens` and `decoded` say how far it has come.

    With a `writer`, the output is appended to the agent's log, for other agents to read.
    """

    def __init__(
        self,
        task: AgentTask,
        estimates: LatencyEstimates,
        emit: Emit,
        *,
        clock: Callable[[], float],
        writer: LogWriter | None = None,
        wrote: Wrote | None = None,
    ) -> None:
        self.task = task
        self._estimates = estimates
        self._emit = emit
        self._clock = clock
        self._writer = writer
        self._wrote = wrote
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._thought_tokens = 0
        self._calls: tuple[ToolCall, ...] = ()
        if task.offer is None:
            self._reader = None
        else:
            self._reader = CallReader(task.offer, task.model)
        self._undecided = NOTHING
        self._split: ReasoningSplit | None = None
        if task.marks is not None:
            last = task.parts[-1] if task.parts else ""
            self._split = ReasoningSplit(task.marks, last if isinstance(last, str) else "")
        self._first: tuple[float, int] | None = None  # when the first tokens came, and how many
        self._load = estimates.prefill(task.model)
        self._prefilling: Prefilling | None = None
        self.prompt_tokens = 0
        self.decoded = 0

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(self._texts)

    @property
    def remaining(self) -> tuple[float, float | None]:
        """Tokens that it is expected to write yet, and seconds from one to the next, where they are
        measured.

        One that is past its mean is expected to write an eighth of it more; one without a mean,
        half of its limit but no more than 512 tokens.
        """
        limit = int(self.task.sampling["max_new_tokens"])
        expected = self.task.hints.output_tokens
        if expected is None:
            mean = min(limit / 2, 512.0)
        else:
            mean = expected
        tokens = max(1.0, min(limit - self.decoded, max(mean - self.decoded, mean / 8)))
        return tokens, self._estimates.token_s(self.task.model.alias)

    def start(self) -> None:
        """Announce the agent, which from now on waits for its engine or its precursors."""
        self._emit(AgentStarted(self._clock(), self.task.agent, self.task.model.alias))

    async def decode(self, ids: list[int], sent: int = 0) -> Output:
        """Send the complete prompt `ids`, of which updates held the first `sent`, and gather what
        is decoded.

        The log is left open: its end mark is the caller's, which knows why the run ended. Raises
        PromptTooLong, EngineStalled after `timeout_s`, and EngineError.
        """
        task = self.task
        check_length(task, len(ids))
        self.prompt_tokens = len(ids)
        sampling = await self._sampling()
        ready_s = self._clock()
        if CURRENT.get() is not None:
            enter_span(task.agent, ready_s)
        self._emit(PromptReady(ready_s, task.agent, len(ids)))
        confidence = Confidence() if task.logprobs else None
        request = Generation(
            task.rid,
            ids,
            sampling,
            task.logprobs,
            affinity=task.rid,
            hints=task.hints,
            on_placed=self._placed,
        )
        self._prefilling = self._load.begin(ready_s, len(ids) - sent, update=False)
        late = (
            f"Agent {task.agent!r} did not end within {task.timeout_s:g} s on {task.model.alias!r}."
        )
        remedy = "Raise the agent's timeout_s or lower its max_new_tokens."
        try:
            with Deadline(task.timeout_s, late=partial(EngineStalled, late, remedy=remedy)):
                if self._split is None or self._split.stage == "answer":
                    finish = await self._generated(request, confidence)
                else:
                    finish = await self._think_and_answer(request, self._split, confidence)
        finally:
            self._prefilled()
        if self._split is not None:
            self._end_split(self._split, confidence)
        if self._reader is not None:
            reader = self._reader
            self._reader = None
            text, self._calls = await reader.finish()
            if text:
                self._take(Tokens((), text), None)
        return self._finished(finish, confidence.value if confidence else None, ready_s)

    async def _generated(
        self,
        request: Generation,
        confidence: Confidence | None,
        decoded: list[int] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Finish:
        """Take what is decoded, to its end, and its ids into `decoded`.

        Raises _Enough as soon as it is; the engine's request is then aborted.
        """
        stream = self.task.model.engine.generate(request)
        try:
            async for item in stream:
                if isinstance(item, Finish):
                    return item
                if decoded is not None:
                    decoded += item.ids
                if self._split is not None and not self._split.passes:
                    item = self._separated(item, self._split)  # noqa: PLW2901 - what is left of it
                    if enough():
                        raise _Enough
                    if not item.ids and not item.text:
                        continue
                self._take(item, confidence)
                if self._wrote is not None and self._wrote(
                    item.text, confidence.value or 0.0 if confidence else 0.0
                ):
                    await asyncio.sleep(
                        0
                    )  # the cancellation that has just been asked for arrives here
        finally:
            await stream.aclose()
        raise EngineError(f"The stream of agent {self.task.agent!r} ended without its last event.")

    # --- thinking

    async def _think_and_answer(
        self, request: Generation, split: ReasoningSplit, confidence: Confidence | None
    ) -> Finish:
        """Generate both by one request, or by two where the thinking has a limit or the answer is
        constrained.

        The first may decode no more tokens than the limit, and no constraint, which would hold for
        the thinking too. The second one's prompt ends with what was decoded, and with the end mark
        where that is missing.
        """
        task = self.task
        sampling = request.sampling
        most = int(request.sampling["max_new_tokens"])
        assert task.marks is not None
        free = {name: given for name, given in sampling.items() if name not in GRAMMARS}
        is_constrained = len(free) < len(sampling)
        limit = min(task.max_thinking_tokens or most, most)
        free["max_new_tokens"] = limit
        finish = None
        decoded = list[int]()
        with suppress(_Enough):
            finish = await self._generated(
                replace(request, sampling=free),
                confidence,
                decoded,
                lambda: is_constrained and split.stage == "answer",
            )
            if finish.reason != "length" or limit == most:
                return finish
        if finish is None:
            used = self._thought_tokens
        else:
            used = finish.completion_tokens
        ids = [*request.input_ids, *decoded]
        if finish is None or split.stage != "answer":
            self._think((), split.finish()[0])
            if split.thought:
                end = f"{split.thought.rstrip()}\n{task.marks.end}\n\n"
            else:
                end = ""
            ids = [*request.input_ids, *await encoded(task.model.tokenizer, end)]
            self._split = ReasoningSplit(task.marks, task.marks.end)
        left = min(most - used, task.model.context_length - len(ids))
        if left < 1:
            return Finish("length", self.prompt_tokens, used, finish.cached_tokens if finish else 0)
        rest = await self._generated(
            replace(
                request,
                # engines abort whatever begins with the id of the request before
                rid=f"answer.{request.rid}",
                input_ids=ids,
                sampling={**sampling, "max_new_tokens": left},
            ),
            confidence,
        )
        return replace(
            rest,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=used + rest.completion_tokens,
            cached_tokens=finish.cached_tokens if finish else 0,  # an aborted request does not say
        )

    def _separated(self, tokens: Tokens, split: ReasoningSplit) -> Tokens:
        """Take the thinking out of what was decoded; the answer's part."""
        before = split.stage
        held = self._undecided
        ids = held.ids + tokens.ids
        logprobs = held.logprobs + tokens.logprobs
        thinking, answer = split.feed(tokens.text)
        if split.stage == "start":
            self._undecided = Tokens(ids, "", logprobs)
            return NOTHING
        self._undecided = NOTHING
        if split.stage == "thinking":
            count = len(ids)
        elif before == "answer" or not split.thought:
            count = 0
        else:
            count = self._tokens_to_end(ids, answer)
        self._think(ids[:count], thinking)
        return Tokens(ids[count:], answer, logprobs[count:])

    def _tokens_to_end(self, ids: tuple[int, ...], answer: str) -> int:
        """How many of `ids` come before the text `answer`; about, where the end mark is not one
        token of its own.
        """
        assert self.task.marks is not None
        encode = self.task.model.tokenizer.encode
        mark = encode(self.task.marks.end)
        if len(mark) == 1 and mark[0] in ids:
            return ids.index(mark[0]) + 1
        return max(0, len(ids) - len(encode(answer)))

    def _think(self, ids: tuple[int, ...], text: str) -> None:
        if not ids and not text:
            return
        self._count(len(ids))
        self._thought_tokens += len(ids)
        self._thoughts.append(text)
        self._emit(AgentThought(self._clock(), self.task.agent, ids, text))

    def _end_split(self, split: ReasoningSplit, confidence: Confidence | None) -> None:
        """Take what was held back. Raises AgentFailed where others wait for an answer and it has
        not begun.
        """
        thinking, answer = split.finish()
        held = self._undecided
        if split.stage == "thinking":
            self._think(held.ids, thinking)
            if self.task.is_read:
                raise ended_in_thinking(self.task.agent, self._thought_tokens)
        elif answer or held.ids:
            self._take(replace(held, text=answer), confidence)

    async def _sampling(self) -> Mapping[str, Any]:
        """With what it asks for in drafts. Of a prediction no more is encoded and sent than engines
        use.
        """
        task = self.task
        sampling = self.task.sampling
        if (
            self._reader is not None and self._reader.parser is not None
        ):  # the marks around calls may be special tokens
            sampling = {**sampling, "skip_special_tokens": False}
        if not (task.drafts or task.prediction):
            return sampling
        expected = task.prediction[: MOST_SOURCE_TOKENS * CHARACTERS_PER_TOKEN]
        if expected:
            ids = await encoded(task.model.tokenizer, expected)
        else:
            ids = []
        return asking_for_drafts(sampling, [ids[:MOST_SOURCE_TOKENS]] if ids else ())

    async def forward(self, source: str, output: Output) -> Output:
        """Take the output of `source` as this agent's own, without asking an engine."""
        text = output.text
        ids = await encoded(self.task.model.tokenizer, text)
        self._texts.append(text)
        if self._writer is not None:
            self._writer.append(Chunk(text, tuple(ids)))
        if self._wrote is not None and self._wrote(text, output.confidence or 0.0):
            await asyncio.sleep(0)  # the cancellation that has just been asked for arrives here
        self._emit(
            AggregationSkipped(self._clock(), self.task.agent, source, text, output.confidence)
        )
        return output.forwarded

    def _placed(self, *placed: Placement) -> None:
        self._emit(AgentPlaced(self._clock(), self.task.agent, placed))

    def _take(self, tokens: Tokens, confidence: Confidence | None) -> None:
        now_s = self._count(len(tokens.ids))
        if self._reader is not None:
            tokens = replace(tokens, text=self._reader.feed(tokens.text))
        if confidence is not None:
            confidence.add(tokens.logprobs)
        if self._writer is not None:
            self._writer.append(Chunk(tokens.text, tokens.ids))
        self._texts.append(tokens.text)
        self._emit(AgentTokens(now_s, self.task.agent, tokens.ids, tokens.text))

    def _count(self, tokens: int) -> float:
        """Note that this number was decoded, now."""
        now_s = self._clock()
        self.decoded += tokens
        if self._first is None:
            self._first = now_s, tokens
            self._prefilled()
        return now_s

    def _prefilled(self) -> None:
        if self._prefilling is not None:
            self._load.end(self._prefilling, self._clock())
            self._prefilling = None

    def _finished(self, finish: Finish, confidence: float | None, ready_s: float) -> Output:
        task = self.task
        now_s = self._clock()
        token_s = None
        if self._first is not None and (more := self.decoded - self._first[1]) > 0:
            token_s = (now_s - self._first[0]) / more
        hints = task.hints
        tokens = finish.completion_tokens
        self._estimates.observe_run(task.model.alias, hints, tokens, now_s - ready_s, token_s)
        self._emit(
            AgentFinished(
                now_s,
                task.agent,
                finish.reason,
                finish.prompt_tokens,
                finish.completion_tokens,
                finish.cached_tokens,
                confidence,
                finish.drafted_tokens,
                finish.accepted_tokens,
            )
        )
        return Output(
            self.text,
            finish,
            confidence,
            token_s,
            "".join(self._thoughts),
            self._thought_tokens,
            self._calls,
        )


def ended_in_thinking(agent: str, tokens: int) -> AgentFailed:
    """The error for an output without an answer that others were to read."""
    return AgentFailed(
        (
            f"Agent {agent!r} ended inside its thinking, after {tokens} tokens of it, and has no "
            "answer to be read."
        ),
        remedy=(
            "Raise its max_new_tokens, set max_thinking_tokens, or turn its thinking off by "
            "chat_template_kwargs."
        ),
    )


def limited(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same parameters with the output limit in them, for engines not to assume one. Raises
    InvalidRequest.
    """
    limit = sampling.get("max_new_tokens")
    if limit is None:
        return {**sampling, "max_new_tokens": DEFAULT_MAX_NEW_TOKENS}
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise InvalidRequest(
            f"max_new_tokens is {limit!r}.", remedy="Make it a whole number of tokens."
        )
    return sampling


def usage_of(task: AgentTask, output: Output) -> AgentUsage:
    """What an agent cost that wrote its output to the end."""
    finish = output.finish
    return AgentUsage(
        task.model.alias,
        finish.prompt_tokens,
        finish.completion_tokens,
        finish.cached_tokens,
        "finished",
        finish.drafted_tokens,
        finish.accepted_tokens,
        output.token_s,
        output.reasoning_tokens,
    )


def could_have_written(output: Output, sampling: Mapping[str, Any], prompt: Prompt) -> bool:
    """Whether an agent with this sampling and prompt may forward `output`.

    The output must not have been cut at its limit, nor be longer than the agent's. It must have the
    forms of answers that the prompt asks for; what the sampling parameters ask for is never taken
    as fulfilled.
    """
    formed = any(sampling.get(asked) for asked in FORMS)
    whole = output.finish.reason != "length" and output.finish.completion_tokens <= int(
        sampling["max_new_tokens"]
    )
    return (
        whole
        and not formed
        and forms_in(prompt.system + prompt.prefix + prompt.suffix) <= forms_in(output.text)
    )


async def check_task(task: AgentTask) -> None:
    """Raise InvalidField for sampling parameters that no engine may get, and PromptTooLong for a
    hopeless prompt: if the parts that are known already do not fit with the output that is asked
    for.

    A text has hardly more tokens than bytes, so short ones need no tokenizing here; the complete
    prompt is checked exactly before it is decoded.
    """
    check_sampling(task.sampling, task.model.vocabulary)
    size = task.sampling["max_new_tokens"]
    texts = [part for part in task.parts if isinstance(part, str)]
    for text in texts:
        size += len(text) if text.isascii() else len(text.encode())
    if size > task.model.context_length:
        require_possible(sum(map(len, texts)), task.model.context_length)
        check_length(task, sum([len(await encoded(task.model.tokenizer, text)) for text in texts]))


def check_length(task: AgentTask, prompt_tokens: int) -> None:
    """Raise PromptTooLong if prompt and output do not fit the model's context."""
    limit = task.sampling["max_new_tokens"]
    model = task.model
    if prompt_tokens + limit > model.context_length:
        raise PromptTooLong(
            f"Agent {task.agent!r} asks for {limit} tokens after a prompt of {prompt_tokens}; "
            f"{model.alias!r} takes"
            f" {model.context_length} in all.",
            remedy=(
                "Shorten the question, lower max_new_tokens, or choose a model with a longer "
                "context."
            ),
        )
