"""What an engine is asked, what it answers, and the contract between."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shell_router.core.hints import NO_HINTS, Hints
from shell_router.core.placement import Placed

FinishReason = Literal["stop", "length", "abort"]

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's own, where `sampling` has no `max_new_tokens`."""

UNSEEN_TOKENS = 32
"""The most tokens per event (`stream_interval`) of an output that no client watches.

Each event costs the engine and the router. But so many tokens take about a second, and a longer silence would look like
a stalled engine's.
"""


class OnPlaced(Protocol):
    """Told where an attempt of a request goes, whenever one is sent: an engine of each role that takes part in it."""

    def __call__(self, *placed: Placed) -> None: ...


def _unheard(*placed: Placed) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to an engine.

    `rid` names the request on every engine it reaches and is unique per attempt. `sampling` holds SGLang's
    `sampling_params` and is passed on unchanged. With `logprobs` every output token comes with its natural-log
    probability. `priority` is the engine's scheduling priority, where it has one. Requests of one `affinity` grow one
    prompt: where several servers prefill, they go to the one that holds its KV. `adapter` names the one of the model's
    adapters that answers; it is loaded where it has to be. `hints` are for the schedulers. `on_placed` is told where it
    goes.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    priority: int | None = None
    affinity: str | None = None
    adapter: str | None = None
    hints: Hints = NO_HINTS
    on_placed: OnPlaced = field(default=_unheard, compare=False)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly decoded tokens: ids, the text they add, and, when asked for, one log-probability each.

    `text` may be empty while a character is incomplete; a stop token is never among `ids`.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The last thing an engine says of a request. Counts are tokens; `cached_tokens` is part of `prompt_tokens`."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Outcome of a prefill-only request: `cached_tokens` of its `prompt_tokens` needed no computation."""

    prompt_tokens: int
    cached_tokens: int


class Engine(Protocol):
    """A prefill-decode pair (or several) that serves one model.

    Both calls raise `EngineError`. A request that failed before its first token may have been sent again under another
    id. When a caller abandons either, by cancelling or by closing the generator, the
    implementation aborts `rid` on every engine it reached; nothing stays running.
    """

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """Yield `Tokens` as they are decoded, then exactly one `Finish`."""
        ...

    async def prefill(self, request: Generation) -> Prefilled:
        """Compute the prompt's KV into the prefill engine's prefix cache; decode nothing (Faster-MoA, 4.3)."""
        ...
