"""The contract between the router and its engines: requests, answers and placements."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol, TypeVar, dataclass_transform

import orjson

from shell_router.core.budget import FREE, Price
from shell_router.core.control_text import ControlText
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.marks import ReasoningMarks

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make a dataclass that only mypy keeps from being changed.

    Making a frozen one takes eight times as long, and requests make many.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


ServiceTier = Literal["priority", "default", "flex"]
TIERS: tuple[ServiceTier, ...] = ("priority", "default", "flex")
RequestClass = ServiceTier | Literal["batch"]
"""Requests of batches take what all other classes leave, and are preempted for them."""


@value
class Session:
    """A conversation of the tenant's client, whose requests stay on one pair.

    Attributes:
        parent: The session that started it.
        prefix: The name, shared with relatives, of those that stay on one prefill server.
    """

    id: str
    parent: str = ""
    prefix: str = ""


@value
class Hints:
    """Optional hints for schedulers.

    Attributes:
        user: The tenant, whose requests have a fair share together.
        program: One run of the topology `topology`.
        agent: The place in that topology.
        output_tokens: Output tokens expected of this request.
        total_tokens: Output tokens expected of this request and all that follow it in its program
            (Chimera, section 3.4).
        end_user: The tenant's own user or conversation, whose requests tend to share prefixes;
            without meaning without the tenant.
        tier: Which requests of the queue go first; those of `flex` wait while others do, and those
            of batches while any other runs that they would slow down.
        session: The session that its client named; without meaning without the tenant.
        began_s: When the run of its topology began, in the event loop's seconds; `inf` without one.
        goes_on: Whether it reads outputs of its run.
        on_preempt: Called when online work needs the place of a batch's request, which leaves it
            soon, but not within the call.
    """

    user: str | None = None
    program: str | None = None
    topology: str | None = None
    agent: str | None = None
    output_tokens: float | None = None
    total_tokens: float | None = None
    end_user: str | None = None
    tier: RequestClass = "default"
    session: Session | None = None
    began_s: float = inf
    goes_on: bool = False
    on_preempt: Callable[[], None] | None = field(default=None, compare=False)


NO_HINTS = Hints()


@value
class Placement:
    """An engine that took a request, the policy and the reason, and the wait for it.

    `engine` is its role and its number among those of its model: `prefill-0`.
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
"""SGLang's limit of a native request without `max_new_tokens`; the router's own always have it."""

UNSTREAMED_INTERVAL = 32
"""The most tokens per event (`stream_interval`) of an output that no client watches.

Each event costs the engine and the router. But that many tokens take about a second, and a longer
silence would look like a stalled engine's.
"""


class OnPlaced(Protocol):
    """Called whenever an attempt of a request is sent, with an engine of each role."""

    def __call__(self, *placed: Placement) -> None:
        """Take in the engines."""


def _ignore(*placed: Placement) -> None:
    """Do nothing."""


@value
class Generation:
    """One request to an engine.

    Attributes:
        rid: Its id on every engine, unique per attempt.
        sampling: SGLang's `sampling_params`, checked by `core.sampling` and sent unchanged.
        logprobs: Whether output tokens come with their natural-log probabilities.
        affinity: Names the growing prompt that it is part of, which stays on one prefill server.
        adapter: The model's LoRA adapter that answers.
        hints: For schedulers.
        on_placed: Called with the engines that it goes to.
        cache_key: Only requests of one key share a prefix cache.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: Values = field(default_factory=dict)
    logprobs: bool = False
    affinity: str | None = None
    adapter: str | None = None
    hints: Hints = NO_HINTS
    on_placed: OnPlaced = field(default=_ignore, compare=False)
    cache_key: str | None = None


def ask_for_drafts(sampling: Values, sources: Sequence[Sequence[int]] = ()) -> NewValues:
    """Add the field for drafts to `sampling_params`: further texts to draft from.

    An SGLang without the plugin ignores it.
    """
    custom = sampling.get("custom_params") or {}
    if not isinstance(custom, Mapping):
        return dict(sampling)  # the engine says what is wrong with it
    return {**sampling, "custom_params": {"drafts": [list(source) for source in sources], **custom}}


@value
class Tokens:
    """Newly decoded tokens: ids, the text they add, and log-probabilities if asked for.

    `text` may be empty while a character is incomplete; a stop token is never among `ids`.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()


@value
class Finish:
    """The end of a request's answer, with counts of tokens.

    `cached_tokens` is part of `prompt_tokens`. `accepted_tokens`, the correct ones of
    `drafted_tokens`, is part of `completion_tokens`. `matched` is the stop string that ended it.
    `estimated` counts were made of texts, because the engine gave none.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    matched: str = ""
    estimated: bool = False


@value
class Prefilled:
    """The outcome of a prefill-only request; `cached_tokens` needed no computation."""

    prompt_tokens: int
    cached_tokens: int


class Engine(Protocol):
    """The servers of one model.

    Both calls raise `EngineError`. A request that failed before its first token may have been sent
    again under another id. When a caller abandons either call, by cancelling or by closing the
    generator, the implementation aborts `rid` on every server it reached; nothing stays running.
    """

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """Yield `Tokens` as they are decoded, then exactly one `Finish`."""

    async def prefill(self, request: Generation) -> Prefilled:
        """Compute the prompt's KV into the prefix cache; decode nothing (Faster-MoA, 4.3)."""


class CallParser(Protocol):
    """Finds tool calls in outputs of its model."""

    @property
    def tool_parser(self) -> str | None:
        """The name of the format; None if it cannot."""

    async def parse_calls(self, text: str, tools: Sequence[Values]) -> tuple[str, list[Any]]:
        """Return the text before the calls, and each call's `name` and `arguments`.

        Raises:
            EngineError: The engine did not parse them.
        """


NO_OPTIONS: Values = {}

NativeRoute = Literal["generate", "prefill_only", "v1/chat/completions", "v1/completions"]


@value
class ChatServing:
    """The engine's own chats.

    Attributes:
        tool_parser: The parser that finds tool calls in their outputs, if it has one.
        reads_calls: Whether it finds calls without such a parser.
    """

    tool_parser: str | None = None
    reads_calls: bool = False


@value
class Relayed:
    """An engine's answer on its way through: its bytes as they come, and the engines."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]
    placed: tuple[Placement, ...] = ()


class Relay(Protocol):
    """Sends a client's native body to the engine, and its answer back."""

    @property
    def chat(self) -> ChatServing | None:
        """The engine's own chats, which take SGLang's fields; None without OpenAI routes."""

    def forward(
        self,
        route: NativeRoute,
        body: bytes,
        *,
        hints: Hints = NO_HINTS,
        fields: Collection[str] = (),
        admit: Callable[[int], None] = lambda requests: None,
    ) -> AbstractAsyncContextManager[Relayed]:
        """Forward `body`, a JSON object in the route's shape as SGLang has it.

        Leaving the context before the answer ended aborts the request on the servers.

        Args:
            route: The engine's route.
            body: The client's bytes.
            hints: For schedulers.
            fields: Fields that it may have besides those that every client may send.
            admit: Called with the number of a batch's requests; it may raise.

        Raises:
            InvalidRequest: The body is no object, or has fields or values that are not forwarded.
            PromptTooLong: A prompt cannot fit.
            EngineError: The engine failed.
        """


class JoinedText(str):
    """A text of several `parts`, for chat templates that read them one by one."""

    parts: Sequence[str]

    @classmethod
    def of(cls, parts: Sequence[str]) -> "JoinedText":
        """Join the parts as SGLang does for templates that read one text."""
        text = cls(" ".join(parts))
        text.parts = parts
        return text


class Tokenizer(Protocol):
    """Text to token ids, and chats to text, as the model's own tokenizer does it."""

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean the same vocabulary and merges: token ids may be exchanged."""

    @property
    def control(self) -> ControlText:
        """The control tokens, which `quote` keeps texts from becoming."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; its special tokens are recognised, and none is added.

        A BREAK has no id: the texts around it are tokenized apart.
        """

    def encode_stable(self, text: str) -> list[int]:
        """Return the leading ids of `encode(text)` that no continuation of `text` should change."""

    def render_chat(
        self,
        messages: Sequence[Values],
        tools: Sequence[Any] = (),
        options: Values = NO_OPTIONS,
    ) -> str:
        """Render the chat template's text, ending where the assistant speaks.

        Args:
            messages: Role, content, and the fields of tools.
            tools: Offered to the model.
            options: Further variables of the template.
        """


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a prefill-only request: `fixed_s`, and `token_s` per uncached token.

    Both are above 0.
    """

    fixed_s: float
    token_s: float

    @classmethod
    def through(cls, few: int, short_s: float, many: int, long_s: float) -> "PrefillCost":
        """Fit the cost to the times of `few` and of `many` tokens.

        Noise cannot make a term less than 1 % of `short_s`.
        """
        least_s = max(0.01 * short_s, 1e-9)
        token_s = max(long_s - short_s, least_s) / max(1, many - few)
        return cls(max(short_s - few * token_s, least_s), token_s)

    def seconds(self, new_tokens: int) -> float:
        """Return the seconds for `new_tokens` that are not cached."""
        return self.fixed_s + self.token_s * new_tokens


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may name; a LoRA adapter is one, too.

    Attributes:
        context_length: Prompt and output tokens together.
        base: The alias of the model that an adapter adapts.
        prefill_cost: The measured cost of one of its `prefill_servers` while idle.
        vocabulary: Token ids lie below it, if it is known.
        drafts: Whether its requests may ask for drafts; with `auto` they do where it pays.
        reasoning: The marks around thinking that is separated from answers.
        call_mark: The beginning of a tool call in its outputs, if it is known.
        call_parser: Reads calls if the mark is not known.
        sampling: Parameters of agents that do not set them.
        price: Of its tokens.
        takes_messages: Its engine takes messages and separates thinking and calls itself. Prompts
            are not prefilled while they grow, and no request continues an output.
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
    sampling: Values = field(default_factory=dict)
    price: Price = FREE
    takes_messages: bool = False

    @property
    def limits_thinking(self) -> bool:
        """Whether its thinking can end at a limit."""
        return self.reasoning is not None and not self.takes_messages

    @property
    def engines_parser(self) -> CallParser | None:
        """The parser of its calls, if its own `call_mark` is not known."""
        parser = self.call_parser
        if self.call_mark is None and parser is not None and parser.tool_parser is not None:
            return parser
        return None


def error_message(body: bytes) -> str:
    """Return the engine's words in an error body of any of SGLang's shapes, shortened."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")[:MESSAGE_CHARACTERS]
    for key in ("error", "message", "detail", "error_message"):
        while isinstance(content, dict) and key in content:
            content = content[key]
    if not isinstance(content, str):
        content = orjson.dumps(content).decode()
    return content[:MESSAGE_CHARACTERS]
