"""What a pair's work costs, in seconds: formulas that a roofline or measurements fill in."""

import math
from bisect import bisect_left
from dataclasses import dataclass

from shell_router.errors import ConfigError

ROUNDING_S = 1e-9
UNLIMITED = 1_000_000_000
"""Tokens; practically no limit."""


def _require_times(*seconds: float) -> None:
    for one in seconds:
        if not 0 <= one < math.inf:
            raise ConfigError(f"a time must be at least 0 and finite, not {one:g}")


def _require_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, not {count}")


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """The prefill engine. A pass over n new tokens that attend p earlier ones and themselves takes

        forward_s + n * token_s + p * attention_s

    and holds at most `chunk_tokens` new ones of at most `prompts` prompts; a longer prompt takes several passes.
    `cache_tokens` is the capacity for prefixes.
    """

    forward_s: float
    token_s: float
    attention_s: float = 0.0
    chunk_tokens: int = 8192
    prompts: int = 4096
    cache_tokens: int = UNLIMITED

    def __post_init__(self) -> None:
        _require_times(self.forward_s, self.token_s, self.attention_s)
        _require_counts(chunk_tokens=self.chunk_tokens, prompts=self.prompts, cache_tokens=self.cache_tokens)

    def pass_s(self, new_tokens: int, attended: int) -> float:
        """Seconds of one pass. `attended` counts pairs of a new token and one that it attends."""
        return self.forward_s + new_tokens * self.token_s + attended * self.attention_s


def attended_pairs(new_tokens: int, before: int) -> int:
    """Pairs of a new token and one it attends, itself included, where `before` tokens precede the new ones."""
    return new_tokens * before + new_tokens * (new_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """From the end of prefill to the first token on the decode side: `request_s` + tokens * `token_s`."""

    request_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        _require_times(self.request_s, self.token_s)

    def seconds(self, tokens: int) -> float:
        """For a prompt of that many tokens."""
        return self.request_s + tokens * self.token_s


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """The decode engine. One step, a pass over n tokens, takes

        step_s + n * sequence_s + c * context_s

    where n is one per sequence and more where drafts are verified, and c the sum of the sequences' lengths.
    `cache_tokens` is the KV capacity for all of them, `max_batch_size` the most sequences of a step. `host_s_per_token`
    is what each token costs the event loops of the server and the router: it delays other work only where all share the
    cores of one machine.

    Without `reserved_tokens` a sequence claims KV for all that it will write, which an engine would have to know. With
    it a sequence is admitted where KV is free for what it has and that many tokens more of every sequence: 512 on
    SGLang's decode servers (`--num-reserved-decode-tokens`), 0 in vLLM. Where KV runs out, those that have written
    least are preempted.
    """

    step_s: float
    sequence_s: float = 0.0
    context_s: float = 0.0
    cache_tokens: int = UNLIMITED
    max_batch_size: int = 4096
    host_s_per_token: float = 0.0
    reserved_tokens: int | None = None

    def __post_init__(self) -> None:
        _require_times(self.step_s, self.sequence_s, self.context_s, self.host_s_per_token)
        _require_counts(cache_tokens=self.cache_tokens, max_batch_size=self.max_batch_size)
        if self.reserved_tokens is not None and self.reserved_tokens < 0:
            raise ConfigError(f"reserved_tokens must be at least 0, not {self.reserved_tokens}")

    def steps_s(self, steps: int, tokens: int, context: int, grows: float | None = None) -> float:
        """Seconds of `steps` steps over `tokens` each; with each the context `grows` by that, or by `tokens`."""
        grown = (tokens if grows is None else grows) * (steps * (steps - 1) // 2)
        return steps * (self.step_s + tokens * self.sequence_s + context * self.context_s) + grown * self.context_s

    def steps_begun(self, seconds: float, at_most: int, tokens: int, context: int, grows: float | None = None) -> int:
        """How many steps have begun after `seconds`, except for rounding; at the very start none has."""
        until, seconds = range(1, at_most), seconds - ROUNDING_S
        return (seconds > 0) + bisect_left(
            until, seconds, key=lambda steps: self.steps_s(steps, tokens, context, grows)
        )


@dataclass(frozen=True, slots=True)
class PairCosts:
    """A prefill engine, a decode engine, and what lies between."""

    prefill: PrefillCosts
    decode: DecodeCosts
    transfer: TransferCosts = TransferCosts()
