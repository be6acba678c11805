"""One agent, from its prompt with holes to the end of its output."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from agent_cache import AgentPromptCache, Chunk, LogWriter
from shell_router.core.events import (
    AgentFinished,
    AgentPassedOn,
    AgentPlaced,
    AgentStarted,
    AgentTokens,
    Event,
    PromptReady,
)
from shell_router.core.generation import DEFAULT_MAX_NEW_TOKENS, Finish, Generation, Tokens
from shell_router.core.model import ServedModel
from shell_router.core.placement import Placed
from shell_router.early_exit.confidence import Confidence
from shell_router.errors import EngineError, EngineStalled, InvalidRequest, PromptTooLong
from shell_router.execution.incremental import LONG_TEXT, Filling, SlotFiller
from shell_router.execution.pace import Pace
from shell_router.execution.prompt import Part


@dataclass(frozen=True, slots=True)
class Output:
    """What an agent wrote, and what the engine said at its end."""

    text: str
    finish: Finish
    confidence: float | None


Wrote = Callable[[str, float], bool]
"""Told of each text an agent writes, and how sure it has been so far (0 where that is not measured); says whether the
agent has been cut off for it."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an agent's complete prompt is decoded. `timeout_s` counts from the moment the prompt is complete."""

    sampling: Mapping[str, Any]
    logprobs: bool
    timeout_s: float


class AgentRun:
    """Fills one prompt and decodes it into the agent's log. `text` and `decoded` tell how far it has come."""

    def __init__(
        self,
        filling: Filling,
        decoding: Decoding,
        writer: LogWriter,
        cache: AgentPromptCache,
        pace: Pace,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float],
        wrote: Wrote = lambda _text, _confidence: False,
    ) -> None:
        self._filling = filling
        self._decoding = decoding
        self._writer = writer
        self._cache = cache
        self._pace = pace
        self._emit = emit
        self._wrote = wrote
        self._clock = clock
        self._texts: list[str] = []
        self._first: tuple[float, int] | None = None  # when the first tokens came, and how many
        self._task: asyncio.Task[Any] | None = None
        self._passed: tuple[str, Output] | None = None
        self.prompt_tokens = 0
        self.decoded = 0

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(self._texts)

    @property
    def passes_on(self) -> bool:
        """Whether its output is another agent's."""
        return self._passed is not None

    def pass_on(self, source: str, output: Output) -> None:
        """Let the run end with the output of `source`, and drop its prompt, which must still wait for precursors."""
        if self._passed is None:
            self._passed = source, output
            if self._task is not None:
                self._task.cancel()

    async def run(self) -> Output:
        """Run to the end. The log is left open: its end mark is the caller's, who knows why the run ended.

        Raises AgentFailed, PrecursorTimeout, PromptTooLong, and EngineError.
        """
        self._emit(AgentStarted(self._clock(), self._filling.agent, self._filling.model.alias))
        self._task = asyncio.current_task()
        try:
            if self._passed is None:
                return await self._write()
        except asyncio.CancelledError:
            if self._passed is None or self._task is None or self._task.uncancel():
                raise  # or somebody else wants it to end, too
        finally:
            self._task = None  # cancelled, it would refer back to this object by its traceback
        assert self._passed is not None
        return await self._hand_on(*self._passed)

    async def _hand_on(self, source: str, output: Output) -> Output:
        agent, text, encode = self._filling.agent, output.text, self._filling.model.tokenizer.encode
        ids = encode(text) if len(text) < LONG_TEXT else await asyncio.to_thread(encode, text)
        self._writer.append(Chunk(text, tuple(ids)))
        self._texts.append(text)
        if self._wrote(text, output.confidence or 0.0):
            await asyncio.sleep(0)  # where the cancellation comes that has just been asked for
        self._emit(AgentPassedOn(self._clock(), agent, source, text, output.confidence))
        return output

    async def _write(self) -> Output:
        agent, model = self._filling.agent, self._filling.model
        ids = await SlotFiller(self._filling, self._cache, self._pace, self._emit, clock=self._clock).fill()
        check_length(agent, model, len(ids), self._decoding.sampling)
        self.prompt_tokens = len(ids)
        ready_s = self._clock()
        self._emit(PromptReady(ready_s, agent, len(ids)))
        try:
            async with asyncio.timeout(self._decoding.timeout_s):
                output = await self._decode(ids)
        except TimeoutError as error:
            raise EngineStalled(
                f"Agent {agent!r} did not end within {self._decoding.timeout_s:g} s on {model.alias!r}.",
                remedy="Raise the agent's timeout_s or lower its max_new_tokens.",
            ) from error
        now_s = self._clock()
        self._pace.observe_run(model.alias, now_s - ready_s)
        if self._first is not None:
            self._pace.observe_decode(model.alias, self.decoded - self._first[1], now_s - self._first[0])
        hints = self._filling.hints
        self._pace.observe_output(model.alias, hints.topology, hints.agent, output.finish.completion_tokens)
        self._emit_finished(output)
        return output

    async def _decode(self, ids: list[int]) -> Output:
        confidence = Confidence()
        rid, decoding = self._filling.rid, self._decoding
        hints, told = self._filling.hints, self._placed
        sampling, logprobs = decoding.sampling, decoding.logprobs
        request = Generation(rid, ids, sampling, logprobs, affinity=rid, hints=hints, on_placed=told)
        async with aclosing(self._filling.model.engine.generate(request)) as stream:
            async for item in stream:
                if isinstance(item, Finish):
                    return Output(self.text, item, confidence.value if self._decoding.logprobs else None)
                confidence.add(item.logprobs)
                self._tell(item)
                if self._wrote(item.text, confidence.value or 0.0):
                    await asyncio.sleep(0)  # where the cancellation comes that has just been asked for
        raise EngineError(f"The stream of agent {self._filling.agent!r} ended without its last event.")

    def _placed(self, *placed: Placed) -> None:
        self._emit(AgentPlaced(self._clock(), self._filling.agent, placed))

    def _tell(self, tokens: Tokens) -> None:
        self._writer.append(Chunk(tokens.text, tokens.ids))
        self._texts.append(tokens.text)
        self.decoded += len(tokens.ids)
        now_s = self._clock()
        if self._first is None:
            self._first = now_s, len(tokens.ids)
        self._emit(AgentTokens(now_s, self._filling.agent, tokens.ids, tokens.text))

    def _emit_finished(self, output: Output) -> None:
        finish = output.finish
        self._emit(
            AgentFinished(
                self._clock(),
                self._filling.agent,
                finish.reason,
                finish.prompt_tokens,
                finish.completion_tokens,
                finish.cached_tokens,
                output.confidence,
            )
        )


_FORMING = ("json_schema", "regex", "ebnf", "structural_tag", "stop", "stop_token_ids", "stop_regex", "min_new_tokens")


def could_have_written(output: Output, sampling: Mapping[str, Any]) -> bool:
    """Whether an agent with this sampling may pass `output` on: it asks for no form, and no fewer tokens."""
    formed = any(sampling.get(asked) for asked in _FORMING)
    return not formed and output.finish.completion_tokens <= _wanted_tokens(sampling)


def check_parts(agent: str, model: ServedModel, parts: Sequence[Part], sampling: Mapping[str, Any]) -> None:
    """Raise PromptTooLong where the parts known already do not fit with what is wanted.

    A text has hardly more tokens than bytes, so short ones need no tokenizing to be let through; the complete prompt
    is checked exactly before it is decoded.
    """
    texts = [part for part in parts if isinstance(part, str)]
    if sum(len(text.encode()) for text in texts) + _wanted_tokens(sampling) > model.context_length:
        check_length(agent, model, sum(len(model.tokenizer.encode(text)) for text in texts), sampling)


def check_length(agent: str, model: ServedModel, prompt_tokens: int, sampling: Mapping[str, Any]) -> None:
    """Raise PromptTooLong where prompt and wanted output do not fit the model's context."""
    wanted = _wanted_tokens(sampling)
    if prompt_tokens + wanted > model.context_length:
        raise PromptTooLong(
            f"Agent {agent!r} asks for {wanted} tokens after a prompt of {prompt_tokens}; {model.alias!r} takes"
            f" {model.context_length} in all.",
            remedy="Shorten the question, lower max_new_tokens, or choose a model with a longer context.",
        )


def _wanted_tokens(sampling: Mapping[str, Any]) -> int:
    wanted = sampling.get("max_new_tokens")
    if wanted is None:
        return DEFAULT_MAX_NEW_TOKENS
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
        raise InvalidRequest(f"max_new_tokens is {wanted!r}.", remedy="Make it a whole number of tokens.")
    return wanted
