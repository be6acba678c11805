"""The thinking of reasoning models: separated from their answers, and limited."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from shell_router.core.engine import Finish, Generation, ServedModel, Tokens
from shell_router.core.events import AgentThought, Emit
from shell_router.core.marks import ReasoningMarks, ReasoningSplit
from shell_router.core.sampling import GRAMMARS
from shell_router.errors import AgentFailed
from shell_router.moa.prompt import encode_text

NO_TOKENS = Tokens((), "")

Consume = Callable[[Generation], Awaitable[Finish]]
"""Sends a request and consumes its stream; each piece goes through `Thinking.separate`."""


class _AnswerBegins(Exception):
    """The answer begins, and its grammar needs a request of its own."""


class Thinking:
    """The thinking of one agent, which is separated from its answer while both are decoded.

    Attributes:
        tokens: How many tokens of thinking were decoded.
    """

    def __init__(
        self,
        agent: str,
        model: ServedModel,
        marks: ReasoningMarks,
        prompt_end: str,
        count: Callable[[int], float],
        emit: Emit,
    ) -> None:
        """Begin after a prompt that ends with the text `prompt_end`.

        `count` takes a number of decoded tokens and returns the time.
        """
        self.tokens = 0
        self._agent = agent
        self._model = model
        self._marks = marks
        self._count = count
        self._emit = emit
        self._split = ReasoningSplit(marks, prompt_end)
        self._passes = False
        self._texts: list[str] = []
        self._undecided = NO_TOKENS
        self._decoded: list[int] | None = None
        self._stops_at_answer = False

    @property
    def text(self) -> str:
        """The thinking so far."""
        return "".join(self._texts)

    async def generate(
        self, request: Generation, max_tokens: int | None, consume: Consume
    ) -> Finish:
        """Generate thinking and answer, by two requests if either of them is constrained.

        The first request decodes at most `max_tokens` and has no grammar, which would hold for the
        thinking, too. The second one's prompt ends with what was decoded, and with the end mark if
        that is missing.
        """
        if self._split.stage == "answer" or self._model.takes_messages:
            return await consume(request)
        sampling = request.sampling
        most = int(sampling["max_new_tokens"])
        limit = min(max_tokens or most, most)
        first = await self._generate_first(request, limit, consume)
        if first is not None and (first.reason != "length" or limit == most):
            return first
        if first is None:
            used = self.tokens
            cached = 0  # an aborted request does not say
        else:
            used = first.completion_tokens
            cached = first.cached_tokens
        prompt_tokens = len(request.input_ids)
        ids = await self._extend_prompt(request, has_answer=first is not None)
        left = min(most - used, self._model.context_length - len(ids))
        if left < 1:
            return Finish("length", prompt_tokens, used, cached)
        second = replace(
            request,
            # engines abort every request whose id begins with an aborted one's
            rid=f"answer.{request.rid}",
            input_ids=ids,
            sampling={**sampling, "max_new_tokens": left},
        )
        rest = await consume(second)
        return replace(
            rest,
            prompt_tokens=prompt_tokens,
            completion_tokens=used + rest.completion_tokens,
            cached_tokens=cached,
        )

    async def _generate_first(
        self, request: Generation, limit: int, consume: Consume
    ) -> Finish | None:
        """Generate the thinking; None if it was aborted where a constrained answer began."""
        free = {name: value for name, value in request.sampling.items() if name not in GRAMMARS}
        self._stops_at_answer = len(free) < len(request.sampling)
        self._decoded = []
        try:
            return await consume(replace(request, sampling={**free, "max_new_tokens": limit}))
        except _AnswerBegins:
            return None
        finally:
            self._stops_at_answer = False

    async def _extend_prompt(self, request: Generation, *, has_answer: bool) -> list[int]:
        """Return the prompt of the second request; without an answer the thinking is ended."""
        decoded = self._decoded or []
        self._decoded = None
        split = self._split
        if has_answer and split.stage == "answer":
            return [*request.input_ids, *decoded]
        self._record((), split.finish()[0])
        end = ""
        if split.thought:
            end = f"{split.thought.rstrip()}\n{self._marks.end}\n\n"
        self._split = ReasoningSplit(self._marks, self._marks.end)
        self._passes = False
        return [*request.input_ids, *await encode_text(self._model.tokenizer, end)]

    def separate(self, tokens: Tokens) -> Tokens:
        """Record the thinking in newly decoded tokens and return the answer's part of them."""
        if self._decoded is not None:
            self._decoded += tokens.ids
        if self._passes:
            return tokens
        split = self._split
        before = split.stage
        ids = self._undecided.ids + tokens.ids
        logprobs = self._undecided.logprobs + tokens.logprobs
        thinking, answer = split.feed(tokens.text)
        self._passes = split.passes
        if split.stage == "start":
            self._undecided = Tokens(ids, "", logprobs)
            return NO_TOKENS
        self._undecided = NO_TOKENS
        if split.stage == "thinking":
            count = len(ids)
        elif before == "answer" or not split.thought:
            count = 0
        else:
            count = self._count_to_end(ids, answer)
        self._record(ids[:count], thinking)
        if self._stops_at_answer and split.stage == "answer":
            raise _AnswerBegins
        return Tokens(ids[count:], answer, logprobs[count:])

    def finish(self, *, needs_answer: bool) -> Tokens:
        """Return the answer's tokens that were held back until the output ended.

        Raises:
            AgentFailed: The output `needs_answer`, and ended inside its thinking.
        """
        thinking, answer = self._split.finish()
        held = self._undecided
        if self._split.stage != "thinking":
            return replace(held, text=answer)
        self._record(held.ids, thinking)
        if needs_answer:
            raise make_no_answer_error(self._agent, self.tokens)
        return NO_TOKENS

    def _count_to_end(self, ids: tuple[int, ...], answer: str) -> int:
        """Count the ids before the text `answer`; an estimate if the end mark is several tokens."""
        encode = self._model.tokenizer.encode
        mark = encode(self._marks.end)
        if len(mark) == 1 and mark[0] in ids:
            return ids.index(mark[0]) + 1
        return max(0, len(ids) - len(encode(answer)))

    def _record(self, ids: tuple[int, ...], text: str) -> None:
        if not ids and not text:
            return
        now_s = self._count(len(ids))
        self.tokens += len(ids)
        self._texts.append(text)
        self._emit(AgentThought(now_s, self._agent, ids, text))


def make_no_answer_error(agent: str, tokens: int) -> AgentFailed:
    """Return the error for an agent with readers that wrote only its thinking, of `tokens`."""
    return AgentFailed(
        f"Agent {agent!r} ended inside its thinking, after {tokens} tokens of it, and has no "
        "answer to be read.",
        remedy="Raise its max_new_tokens, set max_thinking_tokens, or turn its thinking off by "
        "chat_template_kwargs.",
    )
