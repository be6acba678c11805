"""The costs of a pair's work in seconds: measured formulas, or a roofline of GPU and model."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from shell_router.errors import require
from shell_router.files.types import Amount, Count, Index, Positive

ROUNDING_S = 1e-9
UNLIMITED = 1_000_000_000
"""Tokens; practically no limit."""

Share = Annotated[float, Interval(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """The costs of a prefill engine.

    A pass over n new tokens that attend p earlier ones and themselves takes

        forward_s + n * token_s + p * attention_s

    and holds at most `chunk_tokens` new ones of at most `prompts` prompts; a longer prompt takes
    several passes. `cache_tokens` is the capacity for prefixes.
    """

    forward_s: Amount
    token_s: Amount
    attention_s: Amount = 0.0
    chunk_tokens: Count = 8192
    prompts: Count = 4096
    cache_tokens: Count = UNLIMITED

    def pass_s(self, new_tokens: int, attended: int) -> float:
        """Return the seconds of one pass. `attended` counts pairs as `attended_pairs` does."""
        return self.forward_s + new_tokens * self.token_s + attended * self.attention_s


def attended_pairs(new_tokens: int, before: int) -> int:
    """Count the pairs of a new token and one that it attends, itself included.

    `before` tokens precede the new ones.
    """
    return new_tokens * before + new_tokens * (new_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """The costs from the end of prefill to the first token on the decode side."""

    request_s: Amount = 0.0
    token_s: Amount = 0.0

    def seconds(self, tokens: int) -> float:
        """Return the seconds for a prompt of that many tokens."""
        return self.request_s + tokens * self.token_s


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """The costs of a decode engine.

    One step, a pass over n tokens, takes

        step_s + n * sequence_s + c * context_s

    where n is one per sequence, or more where drafts are verified, and c is the sum of the
    sequences' lengths.

    Attributes:
        cache_tokens: The KV capacity for all sequences.
        max_batch_size: The most sequences of a step.
        host_s_per_token: The cost of each token for the event loops of server and router. It delays
            other work only where all share the cores of one machine.
        reserved_tokens: None allocates a sequence KV for all that it will write, which an engine
            would have to know. With a number, a sequence is allocated KV where it is free for what
            the sequence has and for that many tokens more of every sequence: 512 on SGLang's decode
            servers (`--num-reserved-decode-tokens`), 0 in vLLM. Where KV runs out, the sequences
            that have written least are preempted.
    """

    step_s: Amount
    sequence_s: Amount = 0.0
    context_s: Amount = 0.0
    cache_tokens: Count = UNLIMITED
    max_batch_size: Count = 4096
    host_s_per_token: Amount = 0.0
    reserved_tokens: Index | None = None

    def steps_s(self, steps: int, tokens: int, context: int, growth: float | None = None) -> float:
        """Return the seconds of `steps` steps over `tokens` each.

        With each step the context grows by `growth`, which is `tokens` by default.
        """
        added = (tokens if growth is None else growth) * (steps * (steps - 1) // 2)
        return (
            steps * (self.step_s + tokens * self.sequence_s + context * self.context_s)
            + added * self.context_s
        )

    def steps_begun(
        self, seconds: float, at_most: int, tokens: int, context: int, growth: float | None = None
    ) -> int:
        """Return how many steps have begun after `seconds`; none at the very start."""
        until = range(1, at_most)
        seconds = seconds - ROUNDING_S
        return (seconds > 0) + bisect_left(
            until, seconds, key=lambda steps: self.steps_s(steps, tokens, context, growth)
        )


@dataclass(frozen=True, slots=True)
class PairCosts:
    """The costs of a prefill engine, a decode engine, and the transfer between them."""

    prefill: PrefillCosts
    decode: DecodeCosts
    transfer: TransferCosts = TransferCosts()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: dense FLOP/s in the model's number format, and bytes/s and bytes of its memory.

    Attributes:
        link: Bytes/s to the next GPU.
        compute_share: The share of `flops` that an engine reaches.
        memory_share: The share of `bandwidth` that an engine reaches.
        usable_share: The share of the memory that an engine may fill.
        pass_s: The cost of a pass before any work.
        request_s: The cost of a request on its way through the engines' processes.
    """

    flops: Positive
    bandwidth: Positive
    memory: Positive
    link: Positive
    compute_share: Share = 0.5
    memory_share: Share = 0.7
    usable_share: Share = 0.88
    pass_s: Amount = 0.0
    request_s: Amount = 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """A dense transformer on `gpus` GPUs per engine, by tensor parallelism without loss.

    `reserved_tokens` are those of `DecodeCosts`, by default SGLang's.
    """

    gpu: str
    parameters: Positive
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count = 128
    bytes: Count = 2
    gpus: Count = 1
    chunk_tokens: Count = 8192
    reserved_tokens: Index | None = 512


def costs_of(model: Roofline, gpu: Gpu) -> PairCosts:
    """Return the costs of a pair, each engine on GPUs of its own.

    A pass reads all weights once; a token takes 2 FLOPs per parameter; a pair of tokens that attend
    takes 4 * heads * head_dim FLOPs per layer; a token's KV takes 2 * layers * kv_heads * head_dim
    numbers. Raises ConfigError if the weights do not fit.
    """
    flops = gpu.flops * gpu.compute_share * model.gpus
    bandwidth = gpu.bandwidth * gpu.memory_share * model.gpus
    weights = model.parameters * model.bytes
    kv_bytes = 2 * model.layers * model.kv_heads * model.head_dim * model.bytes
    capacity = int((gpu.memory * gpu.usable_share * model.gpus - weights) / kv_bytes)
    require(
        capacity >= model.chunk_tokens,
        f"{weights / 1e9:.0f} GB of weights leave no KV capacity on {model.gpus} {model.gpu}",
    )
    pass_s = gpu.pass_s + weights / bandwidth
    token_s = 2 * model.parameters / flops
    attention_s = 4 * model.heads * model.head_dim * model.layers / flops
    return PairCosts(
        PrefillCosts(pass_s, token_s, attention_s, model.chunk_tokens, cache_tokens=capacity),
        DecodeCosts(
            pass_s, token_s, kv_bytes / bandwidth, capacity, reserved_tokens=model.reserved_tokens
        ),
        TransferCosts(gpu.request_s, kv_bytes / (gpu.link * model.gpus)),
    )
