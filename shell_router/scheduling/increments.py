"""How many new tokens make a prefill-only update worth its cost (Faster-MoA, 4.3; adaptive form ours, B2)."""

from dataclasses import dataclass
from typing import Literal

from shell_router.core.generation import UNSEEN_TOKENS
from shell_router.scheduling.update_cost import UpdateCost

ChunkTokens = int | Literal["adaptive"]

_MOST_TOKENS_PER_EVENT_JUDGED = 4


@dataclass(frozen=True, slots=True)
class IncrementSettings:
    """When to send the next update.

    `chunk_tokens` is a fixed number of new tokens, or `adaptive`: as few as are worth an update and keep the share of
    time that all growing prompts together keep the prefill engine busy at or under `busy_share`, between `min_tokens`
    and `max_tokens`.

    A prompt that is complete goes out as a last update first, if more than `tail_share` of it has not been prefilled
    (precursors that end together leave whole slots): so decode's KV is claimed only for prompts that are ready, as in
    step 4 of the paper. The update costs a round trip for which everybody waits, so a shorter rest is prefilled by the
    real request itself. 1 always sends that at once, 0 always the update.
    """

    chunk_tokens: ChunkTokens = "adaptive"
    min_tokens: int = 8
    max_tokens: int = 512
    busy_share: float = 0.5
    tail_share: float = 0.5

    def __post_init__(self) -> None:
        if self.chunk_tokens != "adaptive" and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be 'adaptive' or at least 1, not {self.chunk_tokens!r}")
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens and max_tokens must satisfy 1 <= min <= max, not {self.min_tokens}, {self.max_tokens}"
            )
        if not 0 < self.busy_share <= 1:
            raise ValueError(f"busy_share must be above 0 and at most 1, not {self.busy_share}")
        if not 0 <= self.tail_share <= 1:
            raise ValueError(f"tail_share must be between 0 and 1, not {self.tail_share}")


def tokens_per_increment(
    settings: IncrementSettings, *, cost: UpdateCost | None, arrival_tokens_per_s: float | None, prompts: int = 1
) -> int:
    """New tokens to wait for before the next update, where so many `prompts` of one model grow at a time.

    While `n` tokens arrive, `n / arrival_tokens_per_s` seconds pass; an update of them keeps the engine busy for
    about its mean cost, and so does one of each other prompt. Their ratio is the busy share. And an update is worth
    its cost when its tokens take no less time than the rest of it: what fewer would save at the prompt's end is less
    than what they cost, and where engines share cores that slows down the very decoding that is waited for. Until
    cost and rate are measured the smallest chunk is used, which is how they come to be measured.
    """
    if settings.chunk_tokens != "adaptive":
        return settings.chunk_tokens
    if cost is None or arrival_tokens_per_s is None:
        return settings.min_tokens
    bearable = prompts * cost.mean_s * arrival_tokens_per_s / settings.busy_share
    wanted = max(bearable, cost.fixed_tokens or 0.0)
    return int(min(max(wanted, settings.min_tokens), settings.max_tokens))


def tokens_per_event(settings: IncrementSettings, incremental: bool, *, judged: bool) -> int:
    """Tokens of a precursor that are worth an event of their own, for SGLang's `stream_interval`.

    Its successors send no update of fewer; where it is `judged` in flight, fewer come at once. Each event costs the
    engine and the router about as much as any other. The first token always comes alone.
    """
    most = _MOST_TOKENS_PER_EVENT_JUDGED if judged else UNSEEN_TOKENS
    if not incremental:
        return most
    smallest = settings.min_tokens if settings.chunk_tokens == "adaptive" else settings.chunk_tokens
    return min(smallest, most)
