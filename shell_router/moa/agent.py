"""One agent of a run: its task, and its output while it is decoded."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from math import inf
from typing import Literal

from agent_cache import AgentPromptCache, Chunk, LogKey, LogRead, LogWriter
from shell_router.core.budget import Price, Purse
from shell_router.core.drafts import MOST_SOURCE_TOKENS
from shell_router.core.engine import (
    NO_HINTS,
    Finish,
    Generation,
    Hints,
    Placement,
    ServedModel,
    Tokens,
    ask_for_drafts,
    value,
)
from shell_router.core.events import (
    AgentFinished,
    AgentPlaced,
    AgentPreempted,
    AgentStarted,
    AgentTokens,
    Emit,
    PromptReady,
)
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.marks import ReasoningMarks
from shell_router.core.sampling import OUTPUT_FORMS, check_sampling, require_possible
from shell_router.core.spans import CURRENT, enter_span
from shell_router.early_exit.algorithm1 import Confidence
from shell_router.early_exit.answers import find_forms
from shell_router.early_exit.evidence import ExitEvidence
from shell_router.errors import AgentTimeout, EngineError, PromptTooLong
from shell_router.moa.calls import CallReader, ToolCall, ToolOffer
from shell_router.moa.deadline import Deadline
from shell_router.moa.expectations import LatencyEstimates, guess_output_tokens
from shell_router.moa.journal import RunJournal
from shell_router.moa.preemption import generate_preemptibly
from shell_router.moa.prompt import (
    CHARACTERS_PER_TOKEN,
    Message,
    Part,
    Turn,
    describe_messages,
    encode_text,
)
from shell_router.moa.requests import AgentUsage, CutOff
from shell_router.moa.spending import Account, Spending
from shell_router.moa.thinking import Thinking
from shell_router.routing.increments import Prefilling
from shell_router.topology import Prefill, Prompt


@value
class Source:
    """The log of a precursor, which fills a slot.

    Token ids of this `vocabulary` are taken as they are; all else is read as text. With `kept` that
    is read in place of a log.
    """

    key: LogKey
    vocabulary: str
    kept: LogRead | None = None


@value
class AgentTask:
    """The work of one agent: a prompt, whose slots are filled from `sources`, and how to decode it.

    Attributes:
        sampling: SGLang's parameters. Without `max_new_tokens` the output may fill the context.
        timeout_s: The limit from the complete prompt to the end of the output.
        hints: Sent to the schedulers with every request.
        all_needed: Fail if a precursor failed or was aborted; otherwise its slot is left out.
        begin_s: The limit of the wait for a precursor's first tokens.
        silence_s: The limit of any later wait, noticed after at most twice that time.
        drafts: Whether the engine may draft the output from the prompt.
        prediction: A text that the output is expected to repeat, for drafts.
        marks: The marks around the model's thinking, if it is separated from the output.
        max_thinking_tokens: The limit of the thinking.
        is_read: Whether the agent fails if it ends inside its thinking.
        offer: The tools that the agent may call.
        may_shrink: Whether the output's limit is lowered to what the outputs in its slots leave.
        affinity: The turn whose requests go to one engine, if it is not a request of its own.
        fits_context: Whether the output's limit is lowered to what any prompt leaves.
        warning: What the client is warned of.
        messages: The prompt before the chat template.
    """

    agent: str
    rid: str
    model: ServedModel
    parts: Sequence[Part]
    sampling: Values
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
    may_shrink: bool = False
    affinity: str = ""
    fits_context: bool = False
    warning: str = ""
    messages: Sequence[Message | Turn] = ()

    def list_messages(self) -> list[NewValues]:
        """Return the prompt as traces hold it."""
        kept = {name: source.kept for name, source in self.sources.items()}
        known = {name: read.text for name, read in kept.items() if read is not None}
        return describe_messages(self.messages, known)


@value
class AgentOutput:
    """The complete output of an agent.

    Attributes:
        finish: The engine's last message about it.
        confidence: The geometric mean token probability, None if it was not measured.
        token_s: Seconds per token after the first ones, None if no more came.
        reasoning: The thinking before the text, of `reasoning_tokens`.
        calls: The tool calls at its end.
        warning: See `Answer`.
    """

    text: str
    finish: Finish
    confidence: float | None
    token_s: float | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    calls: tuple[ToolCall, ...] = ()
    warning: str = ""

    def drop_reasoning(self) -> "AgentOutput":
        """Return the output for an agent that forwards it; the thinking is not that agent's."""
        return replace(self, reasoning="", reasoning_tokens=0)


@value
class RunContext:
    """The objects that all agents of one run share."""

    estimates: LatencyEstimates
    cache: AgentPromptCache
    emit: Emit
    clock: Callable[[], float]
    purse: Purse | None = None
    accounts: Sequence[Account] = ()
    journal: RunJournal | None = None
    evidence: ExitEvidence = field(default_factory=ExitEvidence)

    def open_spending(self, price: Price) -> Spending | None:
        """Return what pays for an agent, None if nothing limits what it may spend."""
        if self.purse is None and not self.accounts:
            return None
        return Spending(price, self.purse, self.accounts)


OnText = Callable[[str, float], bool]
"""Called with each text an agent writes and its confidence so far; returns whether the agent has
been cut off.
"""


class Progress:
    """The times and token counts of one agent's decoding, and the load it puts on prefill servers.

    Attributes:
        prompt_tokens: Tokens of the complete prompt, 0 until it is complete.
        decoded: Tokens decoded so far, thinking included.
        token_s: Seconds per token after the first ones; None until the end, or if no more came.
    """

    def __init__(self, task: AgentTask, context: RunContext) -> None:
        self.prompt_tokens = 0
        self.decoded = 0
        self.token_s: float | None = None
        self._task = task
        self._estimates = context.estimates
        self._clock = context.clock
        self._load = context.estimates.get_load(task.model)
        self._prefilling: Prefilling | None = None
        self._ready_s = 0.0
        self._first_s: float | None = None
        self._first_tokens = 0

    @property
    def remaining(self) -> tuple[float, float | None]:
        """The tokens still expected, and the measured seconds per token.

        An agent past its mean length is expected to write an eighth of the mean more.
        """
        limit = self._task.sampling.get("max_new_tokens", self._task.model.context_length)
        mean = self._task.hints.output_tokens
        if mean is None:
            mean = guess_output_tokens(self._task.sampling)
        tokens = max(1.0, min(limit - self.decoded, max(mean - self.decoded, mean / 8)))
        return tokens, self._estimates.get_token_s(self._task.model.alias)

    @property
    def decoding_s(self) -> float:
        """Seconds since the first token, 0 before it."""
        return 0.0 if self._first_s is None else self._clock() - self._first_s

    def begin(self, prompt_tokens: int, sent: int) -> float:
        """Note that the prompt is sent, `sent` tokens of which are prefilled; return the time."""
        self._ready_s = self._clock()
        self.prompt_tokens = prompt_tokens
        self._prefilling = self._load.begin(self._ready_s, prompt_tokens - sent, update=False)
        return self._ready_s

    def count(self, tokens: int) -> float:
        """Note that this number of tokens was decoded; return the time."""
        now_s = self._clock()
        self.decoded += tokens
        if self._first_s is None:
            self._first_s = now_s
            self._first_tokens = tokens
            self.end_prefill()
        return now_s

    def end_prefill(self) -> None:
        """Note that the prompt is prefilled, or given up."""
        if self._prefilling is not None:
            self._load.end(self._prefilling, self._clock())
            self._prefilling = None

    def finish(self, finish: Finish) -> float:
        """Note the end of the output, learn from its times, and return the time."""
        now_s = self._clock()
        later_tokens = self.decoded - self._first_tokens
        if self._first_s is not None and later_tokens > 0:
            self.token_s = (now_s - self._first_s) / later_tokens
        task = self._task
        run_s = now_s - self._ready_s
        tokens = finish.completion_tokens
        self._estimates.observe_run(task.model.alias, task.hints, tokens, run_s, self.token_s)
        return now_s


class AgentRun:
    """Decodes one task; its output goes to its log, to its cluster's gate, and into events.

    Without a `writer` no log is written, and without `on_text` no gate reads along.
    """

    def __init__(
        self,
        task: AgentTask,
        context: RunContext,
        *,
        writer: LogWriter | None = None,
        on_text: OnText | None = None,
    ) -> None:
        self.task = task
        self.progress = Progress(task, context)
        self._emit = context.emit
        self._clock = context.clock
        self._spending = context.open_spending(task.model.price)
        self._journal = context.journal
        self._writer = writer
        self._on_text = on_text
        self._vocabulary = ""
        self._texts: list[str] = []
        self._confidence = Confidence() if task.logprobs else None
        self._call_reader = None
        if task.offer is not None:
            is_constrained = (
                task.sampling.get("json_schema") is not None and not task.model.takes_messages
            )
            self._call_reader = CallReader(task.offer, task.model, is_constrained=is_constrained)
        self._thinking = None
        if task.marks is not None:
            last = task.parts[-1] if task.parts else ""
            prompt_end = last if isinstance(last, str) else ""
            self._thinking = Thinking(
                task.agent, task.model, task.marks, prompt_end, self.progress.count, context.emit
            )

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """The thinking so far, if it is separated from the output."""
        return "" if self._thinking is None else self._thinking.text

    def start(self) -> None:
        """Announce the agent, which from now on waits for its engine or its precursors."""
        task = self.task
        self._emit(AgentStarted(self._clock(), task.agent, task.model.alias, task.list_messages))

    async def decode(self, ids: list[int], sent: int = 0) -> AgentOutput:
        """Send the complete prompt `ids`, of which updates held the first `sent`, and decode it.

        The log is left open: its end mark depends on why the run ended, which the caller knows.

        Raises:
            PromptTooLong: Prompt and output do not fit the model's context.
            BudgetExceeded: The run's budget does not pay for it, or no longer.
            AgentTimeout: The output did not end within `timeout_s`.
            EngineError: The engine failed.
        """
        task = self.task
        limit = limit_output(task, len(ids), may_shrink=task.may_shrink)
        sampling = await self._complete_sampling()
        if self._spending is not None:
            paid_tokens = None
            if self._journal is not None:
                paid_tokens = self._journal.count_recorded(task.rid, task.model.alias, ids)
            limit = await self._spending.begin(len(ids), limit, paid_tokens)
        sampling = {**sampling, "max_new_tokens": limit}
        # what stopped it is in the ids but not in the text, as are marks of thinking and of calls
        stops = sampling.get("stop") or sampling.get("stop_regex")
        if task.model.reasoning is None and task.offer is None and not stops:
            self._vocabulary = task.model.tokenizer.fingerprint
        ready_s = self.progress.begin(len(ids), sent)
        if CURRENT.get() is not None:
            enter_span(task.agent, ready_s)
        self._emit(PromptReady(ready_s, task.agent, len(ids)))
        request = Generation(
            task.rid,
            ids,
            sampling,
            task.logprobs,
            affinity=task.affinity or task.rid,
            hints=task.hints,
            on_placed=self._report_placement,
        )
        late = partial(
            AgentTimeout,
            f"Agent {task.agent!r} did not end within {task.timeout_s:g} s on "
            f"{task.model.alias!r}.",
            remedy="Raise the agent's timeout_s or lower its max_new_tokens.",
        )
        try:
            with Deadline(task.timeout_s, late=late):
                if self._thinking is None:
                    finish = await self._consume(request)
                else:
                    finish = await self._thinking.generate(
                        request, task.max_thinking_tokens, self._consume
                    )
        except BaseException:
            if self._spending is not None:
                self._spending.close()
            raise
        finally:
            self.progress.end_prefill()
        if self._spending is not None:
            self._spending.close(finish)
        return await self._finish(finish)

    async def _complete_sampling(self) -> Values:
        """Return the task's sampling with what its model, its tool calls and its drafts need."""
        task = self.task
        sampling = {**task.model.sampling, **task.sampling}
        if self._call_reader is not None and self._call_reader.parser is not None:
            # the marks around calls may be special tokens
            sampling = {**sampling, "skip_special_tokens": False}
        if not (task.drafts or task.prediction):
            return sampling
        # engines use no more of a prediction than this
        prediction = task.prediction[: MOST_SOURCE_TOKENS * CHARACTERS_PER_TOKEN]
        if not prediction:
            return ask_for_drafts(sampling)
        ids = await encode_text(task.model.tokenizer, prediction)
        return ask_for_drafts(sampling, [ids[:MOST_SOURCE_TOKENS]])

    async def _consume(self, request: Generation) -> Finish:
        """Send the request and consume its stream up to its Finish.

        If the engine has less room than the model's context, an output that may fill the context is
        limited to that room.
        """
        model = self.task.model
        limit = request.sampling["max_new_tokens"]
        try:
            return await self._consume_stream(request)
        except PromptTooLong as refusal:  # in the engine's words
            fills = len(request.input_ids) + limit == model.context_length
            if not (fills and 0 < refusal.excess < limit):
                raise refusal.name_agent(self.task.agent, model.alias) from refusal
            sampling = {**request.sampling, "max_new_tokens": limit - refusal.excess}
        # engines abort every request whose id begins with an aborted one's
        rid = f"less.{request.rid}"
        return await self._consume_stream(replace(request, rid=rid, sampling=sampling))

    async def _consume_stream(self, request: Generation) -> Finish:
        confidence = self._confidence
        model = self.task.model
        if request.hints.tier == "batch":
            stream = generate_preemptibly(model, request, self._report_preemption)
        else:
            stream = model.engine.generate(request)
        try:
            async for item in stream:
                if isinstance(item, Finish):
                    return item
                if self._spending is not None:
                    await self._spending.write(len(item.ids), self.task.agent)
                tokens = item
                if self._thinking is not None:
                    tokens = self._thinking.separate(item)
                    if not tokens.ids and not tokens.text:
                        continue
                self._accept(tokens)
                if self._on_text is not None:
                    mean = confidence.value if confidence else None
                    if self._on_text(tokens.text, mean or 0.0):
                        await asyncio.sleep(0)  # the cancellation just requested arrives here
        finally:
            await stream.aclose()
        raise EngineError(f"The stream of agent {self.task.agent!r} ended without its last event.")

    def _accept(self, tokens: Tokens) -> None:
        """Hand tokens of the answer to all that follow it."""
        now_s = self.progress.count(len(tokens.ids))
        text = tokens.text
        if self._call_reader is not None:
            text = self._call_reader.feed(text)
        if self._confidence is not None:
            self._confidence.add(tokens.logprobs)
        if self._writer is not None:
            self._writer.append(Chunk(text, tokens.ids, self._vocabulary))
        self._texts.append(text)
        self._emit(AgentTokens(now_s, self.task.agent, tokens.ids, text))

    async def _finish(self, finish: Finish) -> AgentOutput:
        """Release what was held back, report the end, and return the output."""
        reasoning_tokens = 0
        if self._thinking is not None:
            answer = self._thinking.finish(needs_answer=self.task.is_read)
            if answer.ids or answer.text:
                self._accept(answer)
            reasoning_tokens = self._thinking.tokens
        calls: tuple[ToolCall, ...] = ()
        warning = self.task.warning
        if self._call_reader is not None:
            warning = " ".join(filter(None, (warning, self._call_reader.warning)))
            text, calls = await self._call_reader.finish()
            self._call_reader = None
            if text:
                self._accept(Tokens((), text))
        confidence = None if self._confidence is None else self._confidence.value
        now_s = self.progress.finish(finish)
        self._emit(
            AgentFinished(
                now_s,
                self.task.agent,
                finish.reason,
                finish.prompt_tokens,
                finish.completion_tokens,
                finish.cached_tokens,
                confidence,
                finish.drafted_tokens,
                finish.accepted_tokens,
            )
        )
        return AgentOutput(
            self.text,
            finish,
            confidence,
            self.progress.token_s,
            self.reasoning,
            reasoning_tokens,
            calls,
            warning,
        )

    def _report_placement(self, *placements: Placement) -> None:
        self._emit(AgentPlaced(self._clock(), self.task.agent, placements))

    def _report_preemption(self, lost_tokens: int) -> None:
        self._emit(AgentPreempted(self._clock(), self.task.agent, lost_tokens))


def count_usage(task: AgentTask, output: AgentOutput) -> AgentUsage:
    """Return the cost of an agent that wrote its output to the end."""
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
        finish.reason,
        cost=task.model.price.cost(
            finish.prompt_tokens, finish.cached_tokens, finish.completion_tokens
        ),
        estimated=finish.estimated,
    )


def count_lost(run: AgentRun, gone: CutOff | Literal["failed"], error: str = "") -> AgentUsage:
    """Return the tokens of an agent that gave no output."""
    model = run.task.model
    prompt_tokens = run.progress.prompt_tokens
    decoded = run.progress.decoded
    cost = model.price.cost(prompt_tokens, 0, decoded)
    return AgentUsage(model.alias, prompt_tokens, decoded, 0, gone, error=error, cost=cost)


def could_have_written(output: AgentOutput, sampling: Values, prompt: Prompt) -> bool:
    """Tell whether an agent with this sampling and prompt may forward `output`.

    The output must not have been cut at its limit, nor be longer than the agent's limit. It must
    have the forms of answers that the prompt asks for. Forms that the sampling parameters ask for
    never count as met.
    """
    if any(sampling.get(name) for name in OUTPUT_FORMS):
        return False
    finish = output.finish
    limit = sampling.get("max_new_tokens", inf)
    if finish.reason == "length" or finish.completion_tokens > limit:
        return False
    return find_forms(prompt.system + prompt.prefix + prompt.suffix) <= find_forms(output.text)


async def check_task(task: AgentTask) -> None:
    """Refuse a task that no engine may get, or whose prompt is already too long.

    A text has hardly more tokens than bytes, so short texts are not tokenized here; the complete
    prompt is checked exactly before it is decoded.

    Raises:
        InvalidField: A sampling parameter is out of its range.
        PromptTooLong: The parts known already do not fit the context together with the output.
    """
    check_sampling(task.sampling, task.model.vocabulary)
    size = task.sampling.get("max_new_tokens", 1)
    texts = [part for part in task.parts if isinstance(part, str)]
    for text in texts:
        size += len(text) if text.isascii() else len(text.encode())
    if size > task.model.context_length:
        require_possible(sum(map(len, texts)), task.model.context_length)
        lengths = [len(await encode_text(task.model.tokenizer, text)) for text in texts]
        limit_output(task, sum(lengths))


def limit_output(task: AgentTask, prompt_tokens: int, *, may_shrink: bool = False) -> int:
    """Return the most tokens of the output: the task's limit, or what the context leaves.

    Raises:
        PromptTooLong: Prompt and output do not fit the model's context. If the output `may_shrink`,
            the context leaves nothing for it.
    """
    limit = task.sampling.get("max_new_tokens")
    model = task.model
    left = model.context_length - prompt_tokens
    if left >= (1 if limit is None or may_shrink or task.fits_context else limit):
        return left if limit is None else min(limit, left)
    wish = "has" if limit is None else f"asks for {limit} tokens after"
    lower = "" if limit is None else "ask for fewer tokens, "
    raise PromptTooLong(
        f"Agent {task.agent!r} {wish} a prompt of {prompt_tokens} tokens; {model.alias!r} takes "
        f"{model.context_length} in all.",
        remedy=f"Shorten the question, {lower}or choose a model with a longer context.",
    )
