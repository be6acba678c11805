"""The contract between the router and its engines: requests, answers, and where each request
went."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, dataclass_transform

import orjson

from shell_router.core.marks import ReasoningMarks

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A dataclass that only mypy keeps from being changed. Making a frozen one takes eight times as
    long, and requests make many."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@value
class Hints:
    """The user, the place in a program, and the output that is expected. All of it is optional.

    `user` is the tenant: its requests have a fair share together. `end_user` is the tenant's own
    user or conversation, whose requests tend to share prefixes; it means nothing without the
    tenant. `program` is one run of the topology `topology`, `agent` the place in it.
    `output_tokens` are those that are expected of this request, `total_tokens` those of this
    request and of all that follow it in its program (Chimera, section 3.4).
    """

    user: str | None = None
    program: str | None = None
    topology: str | None = None
    agent: str | None = None
    output_tokens: float | None = None
    total_tokens: float | None = None
    end_user: str | None = None


NO_HINTS = Hints()


@value
class Placement:
    """An engine that took a request: its name, by which policy and for which reason, and how long
    the request waited.

    `engine` is its role, or `engine` where it has all roles, and its number among those of its
    model: `prefill-0`.
    """

    engine: str
    policy: str
    why: str
    waited_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.engine} ({self.policy}: {self.why})"


FinishReason = Literal["stop", "length", "abort"]

MESSAGE_CHARACTERS = 2000

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's own, where `sampling` has no `max_new_tokens`."""

UNSTREAMED_INTERVAL = 32
"""The most tokens per event (`stream_interval`) of an output that no client watches.

Each event costs the engine and the router. But that many tokens take about a second, and a longer
silence would look like a stalled engine's.
"""


class OnPlaced(Protocol):
    """Called whenever an attempt of a request is sent, with an engine of each role that takes part
    in it.
    """

    def __call__(self, *placed: Placement) -> None: ...


def _ignore(*placed: Placement) -> None:
    """Do nothing."""


@value
class Generation:
    """One request to an engine.

    `rid` names the request on every engine it reaches and is unique per attempt. `sampling` holds
    SGLang's `sampling_params`, checked by `core.sampling`, and is sent unchanged. With `logprobs`
    every output token comes with its natural-log probability. Requests of one `affinity` grow one
    prompt: where several servers prefill, they go to the one that holds its KV. `adapter` names the
    one of the model's LoRA adapters that answers. `hints` are for the
    schedulers. `on_placed` is called with the engines it goes to. Only requests of one `cache_key`
    share a prefix cache.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    affinity: str | None = None
    adapter: str | None = None
    hints: Hints = NO_HINTS
    on_placed: OnPlaced = field(default=_ignore, compare=False)
    cache_key: str | None = None


def asking_for_drafts(
    sampling: Mapping[str, Any], sources: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """SGLang's `sampling_params` with the field that engines read: further texts to draft from,
    besides the prompt.

    An SGLang without the plugin leaves it alone.
    """
    custom = sampling.get("custom_params") or {}
    if not isinstance(custom, Mapping):
        return dict(sampling)  # the engine says what is wrong with it
    return {**sampling, "custom_params": {"drafts": [list(one) for one in sources], **custom}}


@value
class Tokens:
    """Newly decoded tokens: ids, the text they add, and, when asked for, one log-probability each.

    `text` may be empty while a character is incomplete; a stop token is never among `ids`.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()


@value
class Finish:
    """The last thing an engine says of a request. Counts are tokens; `cached_tokens` is part of
    `prompt_tokens`, and `accepted_tokens`, those of the `drafted_tokens` that were right, of
    `completion_tokens`."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@value
class Prefilled:
    """Outcome of a prefill-only request: `cached_tokens` of its `prompt_tokens` needed no
    computation.
    """

    prompt_tokens: int
    cached_tokens: int


class Engine(Protocol):
    """A prefill-decode pair (or several) that serves one model.

    Both calls raise `EngineError`. A request that failed before its first token may have been sent
    again under another id. When a caller abandons either, by cancelling or by closing the
    generator, the implementation aborts `rid` on every engine it reached; nothing stays running.
    """

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """Yield `Tokens` as they are decoded, then exactly one `Finish`."""
        ...

    async def prefill(self, request: Generation) -> Prefilled:
        """Compute the prompt's KV into the prefill engine's prefix cache; decode nothing
        (Faster-MoA, 4.3).
        """
        ...


class CallParser(Protocol):
    """Finds calls of tools in outputs of its model; `tool_parser` is the name of the format, None
    where it cannot.
    """

    @property
    def tool_parser(self) -> str | None: ...

    async def parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[Any]]:
        """The text before the calls, and each call's `name` and `arguments`. Raises EngineError."""
        ...


NO_OPTIONS: Mapping[str, Any] = {}

NativeRoute = Literal["generate", "prefill_only", "v1/chat/completions", "v1/completions"]


@value
class ChatServing:
    """What servers say of their own chats: the parser that finds tool calls in their outputs, if
    they have one.
    """

    tool_parser: str | None = None


@value
class Relayed:
    """An engine's answer on its way through: bytes as they came, and where they come from."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]
    placed: tuple[Placement, ...] = ()


class Relay(Protocol):
    """Sends a client's native body to a pair, and its answer back.

    `chat` is None where the servers have no OpenAI routes of their own: those take SGLang's own
    fields.
    """

    @property
    def chat(self) -> ChatServing | None: ...

    def forward(
        self,
        route: NativeRoute,
        body: bytes,
        *,
        affinity: str | None = None,
        hints: Hints = NO_HINTS,
        fields: Collection[str] = (),
        admit: Callable[[int], None] = lambda requests: None,
    ) -> AbstractAsyncContextManager[Relayed]:
        """Forward `body`, a JSON object in the route's shape as SGLang has it. `affinity` is as in
        `Generation`.

        It may have `fields` besides those that every client may send. `admit` is called with the
        number of a batch's requests, and may raise. Raises InvalidRequest for a body that is no
        object or has fields or values that are not forwarded, PromptTooLong and EngineError.
        Leaving the context before the answer ended aborts the request on both engines.
        """
        ...


class Tokenizer(Protocol):
    """Text to token ids and chats to text, as the model's own tokenizer does it."""

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean the same vocabulary and merges: token ids may be exchanged."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special tokens are added, those written in the text are recognised."""
        ...

    def encode_stable(self, text: str) -> list[int]:
        """The leading ids of `encode(text)` that no continuation of `text` is expected to
        change."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        """The chat template's text for `messages` (role, content, and what belongs to tools),
        ending where the assistant speaks. `tools` are offered to the model; `options` are further
        variables of the template."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a prefill-only request: `fixed_s`, whatever it holds, and `token_s` per token that
    is not cached.

    Both are above 0.
    """

    fixed_s: float
    token_s: float

    @classmethod
    def through(cls, few: int, short_s: float, many: int, long_s: float) -> "PrefillCost":
        """From the times of `few` and of `many` tokens. Noise cannot make a term less than 1 % of
        `short_s`.
        """
        least_s = max(0.01 * short_s, 1e-9)
        token_s = max(long_s - short_s, least_s) / max(1, many - few)
        return cls(max(short_s - few * token_s, least_s), token_s)

    def seconds(self, new_tokens: int) -> float:
        """For `new_tokens` that are not cached."""
        return self.fixed_s + self.token_s * new_tokens


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may name. `context_length` counts prompt and output tokens together.

    An adapter is a model too; `base` is then the alias of the model that it adapts. `prefill_cost`
    is what was measured of one of its `prefill_servers` while it was idle. Token ids lie below
    `vocabulary`, where known. `drafts` is whether its requests may ask for drafts; with `auto` they
    do where it pays. `reasoning` are the marks around its thinking, if that is to be separated from
    its answers; `call_mark` is what begins a call of a tool in its outputs, if that is known; else
    its servers' `call_parser` may read them.
    """

    alias: str
    engine: Engine
    tokenizer: Tokenizer
    context_length: int
    base: str | None = None
    prefill_cost: PrefillCost | None = None
    prefill_servers: int = 1
    vocabulary: int | None = None
    drafts: bool | Literal["auto"] = "auto"
    reasoning: ReasoningMarks | None = None
    call_mark: str | None = None
    call_parser: CallParser | None = None

    @property
    def engines_parser(self) -> CallParser | None:
        """What reads its calls, where its own `call_mark` is not known."""
        parser = self.call_parser
        if self.call_mark is None and parser is not None and parser.tool_parser is not None:
            return parser
        return None


def error_message(body: bytes) -> str:
    """The engine's own words in an error body of any of SGLang's shapes, shortened."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")[:MESSAGE_CHARACTERS]
    for key in ("error", "message", "detail", "error_message"):
        while isinstance(found, dict) and key in found:
            found = found[key]
    return (found if isinstance(found, str) else orjson.dumps(found).decode())[:MESSAGE_CHARACTERS]
