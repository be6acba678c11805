"""One agent of a run: what it is to do, its prompt, and its output while it is decoded."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import field
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
    AgentTokens,
    AggregationSkipped,
    Event,
    PromptReady,
)
from shell_router.core.sampling import check_sampling, require_possible
from shell_router.early_exit import Confidence
from shell_router.early_exit.answers import forms_in
from shell_router.errors import EngineError, EngineStalled, InvalidRequest, PromptTooLong
from shell_router.moa.choosing import LatencyEstimates
from shell_router.moa.prompt import CHARACTERS_PER_TOKEN, Part, encoded
from shell_router.moa.requests import AgentUsage
from shell_router.routing.increments import Prefilling
from shell_router.topology import Prefill, Prompt

FORMS = ("json_schema", "regex", "ebnf", "structural_tag", "stop", "stop_token_ids", "stop_regex", "min_new_tokens")
"""Sampling parameters that constrain what an output looks like."""


@value
class Source:
    """Where a slot's output comes from. `shares_ids`: the writer's ids are this model's too, and all of its output."""

    key: LogKey
    shares_ids: Callable[[], bool]


@value
class AgentTask:
    """What one agent is to do: a prompt, its slots filled from `sources`, decoded with `sampling`.

    `sampling` always holds `max_new_tokens`. `timeout_s` counts from the moment the prompt is complete. A slot whose
    precursor was aborted or failed is left out with the text around it, or, with `all_needed`, fails the agent.
    `begin_s` limits the wait for a precursor's first sign, `silence_s` any later one, which may be noticed up to twice
    as late. `hints` go with every request. With `drafts` the engine may draft the output from the prompt, and from
    `prediction`, a text that it is expected to repeat.
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


@value
class Output:
    """What an agent wrote, what the engine said at its end, and the geometric mean token probability if measured.

    `token_s` are seconds per token after the first ones, None where no more came.
    """

    text: str
    finish: Finish
    confidence: float | None
    token_s: float | None = None


Wrote = Callable[[str, float], bool]
"""Called with each text an agent writes and its confidence so far; returns whether the agent has been cut off."""


class AgentRun:
    """Decodes one task. `text`, `prompt_tokens` and `decoded` say how far it has come.

    With a `writer`, the output is appended to the agent's log, for other agents to read.
    """

    def __init__(
        self,
        task: AgentTask,
        estimates: LatencyEstimates,
        emit: Callable[[Event], None],
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
        """Tokens that it is expected to write yet, and seconds from one to the next, where they are measured.

        One that is past its mean is expected to write an eighth of it more; one without a mean, half of its limit but
        no more than 512 tokens.
        """
        limit, expected = int(self.task.sampling["max_new_tokens"]), self.task.hints.output_tokens
        mean = min(limit / 2, 512.0) if expected is None else expected
        tokens = max(1.0, min(limit - self.decoded, max(mean - self.decoded, mean / 8)))
        return tokens, self._estimates.token_s(self.task.model.alias)

    def start(self) -> None:
        """Announce the agent, which from now on waits for its engine or its precursors."""
        self._emit(AgentStarted(self._clock(), self.task.agent, self.task.model.alias))

    async def decode(self, ids: list[int], sent: int = 0) -> Output:
        """Send the complete prompt `ids`, of which updates held the first `sent`, and gather what is decoded.

        The log is left open: its end mark is the caller's, which knows why the run ended. Raises PromptTooLong,
        EngineStalled after `timeout_s`, and EngineError.
        """
        task = self.task
        check_length(task, len(ids))
        self.prompt_tokens = len(ids)
        sampling = await self._sampling()
        ready_s = self._clock()
        self._emit(PromptReady(ready_s, task.agent, len(ids)))
        confidence = Confidence() if task.logprobs else None
        request = Generation(
            task.rid, ids, sampling, task.logprobs, affinity=task.rid, hints=task.hints, on_placed=self._placed
        )
        finish = None
        self._prefilling = self._load.begin(ready_s, len(ids) - sent, update=False)
        try:
            async with asyncio.timeout(task.timeout_s), aclosing(task.model.engine.generate(request)) as stream:
                async for item in stream:
                    if isinstance(item, Finish):
                        finish = item
                        break
                    self._take(item, confidence)
                    if self._wrote is not None and self._wrote(
                        item.text, confidence.value or 0.0 if confidence else 0.0
                    ):
                        await asyncio.sleep(0)  # the cancellation that has just been asked for arrives here
        except TimeoutError as error:
            raise EngineStalled(
                f"Agent {task.agent!r} did not end within {task.timeout_s:g} s on {task.model.alias!r}.",
                remedy="Raise the agent's timeout_s or lower its max_new_tokens.",
            ) from error
        finally:
            self._prefilled()
        if finish is None:
            raise EngineError(f"The stream of agent {task.agent!r} ended without its last event.")
        return self._finished(finish, confidence.value if confidence else None, ready_s)

    async def _sampling(self) -> Mapping[str, Any]:
        """With what it asks for in drafts. Of a prediction no more is encoded and sent than engines use."""
        task = self.task
        if not (task.drafts or task.prediction):
            return task.sampling
        expected = task.prediction[: MOST_SOURCE_TOKENS * CHARACTERS_PER_TOKEN]
        ids = await encoded(task.model.tokenizer, expected) if expected else []
        return asking_for_drafts(task.sampling, [ids[:MOST_SOURCE_TOKENS]] if ids else ())

    async def forward(self, source: str, output: Output) -> Output:
        """Take the output of `source` as this agent's own, without asking an engine."""
        text = output.text
        ids = await encoded(self.task.model.tokenizer, text)
        self._texts.append(text)
        if self._writer is not None:
            self._writer.append(Chunk(text, tuple(ids)))
        if self._wrote is not None and self._wrote(text, output.confidence or 0.0):
            await asyncio.sleep(0)  # the cancellation that has just been asked for arrives here
        self._emit(AggregationSkipped(self._clock(), self.task.agent, source, text, output.confidence))
        return output

    def _placed(self, *placed: Placement) -> None:
        self._emit(AgentPlaced(self._clock(), self.task.agent, placed))

    def _take(self, tokens: Tokens, confidence: Confidence | None) -> None:
        now_s, count = self._clock(), len(tokens.ids)
        if confidence is not None:
            confidence.add(tokens.logprobs)
        if self._writer is not None:
            self._writer.append(Chunk(tokens.text, tokens.ids))
        self._texts.append(tokens.text)
        self.decoded += count
        if self._first is None:
            self._first = now_s, count
            self._prefilled()
        self._emit(AgentTokens(now_s, self.task.agent, tokens.ids, tokens.text))

    def _prefilled(self) -> None:
        if self._prefilling is not None:
            self._load.end(self._prefilling, self._clock())
            self._prefilling = None

    def _finished(self, finish: Finish, confidence: float | None, ready_s: float) -> Output:
        task, now_s = self.task, self._clock()
        model, hints, estimates = task.model.alias, task.hints, self._estimates
        estimates.observe_run(model, now_s - ready_s)
        token_s = None
        if self._first is not None and (more := self.decoded - self._first[1]) > 0:
            token_s = (now_s - self._first[0]) / more
            estimates.observe_decode(model, token_s)
        estimates.observe_output(model, hints.topology, hints.agent, finish.completion_tokens)
        self._emit(
            AgentFinished(
                self._clock(),
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
        return Output(self.text, finish, confidence, token_s)


def limited(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same parameters with the output limit in them, for engines not to assume one. Raises InvalidRequest."""
    limit = sampling.get("max_new_tokens")
    if limit is None:
        return {**sampling, "max_new_tokens": DEFAULT_MAX_NEW_TOKENS}
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise InvalidRequest(f"max_new_tokens is {limit!r}.", remedy="Make it a whole number of tokens.")
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
    )


def could_have_written(output: Output, sampling: Mapping[str, Any], prompt: Prompt) -> bool:
    """Whether an agent with this sampling and prompt may forward `output`.

    The output must not have been cut at its limit, nor be longer than the agent's. It must have the forms of answers
    that the prompt asks for; what the sampling parameters ask for is never taken as fulfilled.
    """
    formed = any(sampling.get(asked) for asked in FORMS)
    whole = output.finish.reason != "length" and output.finish.completion_tokens <= int(sampling["max_new_tokens"])
    return whole and not formed and forms_in(prompt.system + prompt.prefix + prompt.suffix) <= forms_in(output.text)


def check_parts(task: AgentTask) -> AgentTask:
    """Raise InvalidField for sampling parameters that no engine may get, and PromptTooLong for a hopeless prompt."""
    check_sampling(task.sampling, task.model.vocabulary)
    require_possible(sum(len(part) for part in task.parts if isinstance(part, str)), task.model.context_length)
    return task


async def check_known(task: AgentTask) -> None:
    """Raise PromptTooLong if the parts that are known already do not fit with the output that is asked for.

    A text has hardly more tokens than bytes, so short ones need no tokenizing here; the complete prompt is checked
    exactly before it is decoded.
    """
    size, texts = task.sampling["max_new_tokens"], [part for part in task.parts if isinstance(part, str)]
    for text in texts:
        size += len(text) if text.isascii() else len(text.encode())
    if size > task.model.context_length:
        check_length(task, sum([len(await encoded(task.model.tokenizer, text)) for text in texts]))


def check_length(task: AgentTask, prompt_tokens: int) -> None:
    """Raise PromptTooLong if prompt and output do not fit the model's context."""
    limit, model = task.sampling["max_new_tokens"], task.model
    if prompt_tokens + limit > model.context_length:
        raise PromptTooLong(
            f"Agent {task.agent!r} asks for {limit} tokens after a prompt of {prompt_tokens}; {model.alias!r} takes"
            f" {model.context_length} in all.",
            remedy="Shorten the question, lower max_new_tokens, or choose a model with a longer context.",
        )
