"""Costs of engines that were not measured, from their GPU and their model."""

from dataclasses import dataclass
from typing import Annotated

from shell_router.errors import require
from shell_router.standins.simulated import DecodeCosts, PairCosts, PrefillCosts, TransferCosts
from shell_router.topology.forms import Number

Positive = Annotated[float, Number("", above=0, limit=1e300)]
Share = Annotated[float, Number("", above=0, at_most=1)]
Seconds = Annotated[float, Number("", at_least=0)]
Count = Annotated[int, Number("", at_least=1, whole=True)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: dense FLOP/s in the model's number format, bytes/s of memory, bytes of it, bytes/s to the next GPU.

    `compute_share` and `memory_share` say how much of both rates an engine reaches, `usable_share` how much of the
    memory it may fill, `pass_s` what a pass costs before any work, and `request_s` what a request costs on its way
    through the engines' processes.
    """

    flops: Positive
    bandwidth: Positive
    memory: Positive
    link: Positive
    compute_share: Share = 0.5
    memory_share: Share = 0.7
    usable_share: Share = 0.88
    pass_s: Seconds = 0.0
    request_s: Seconds = 0.0


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
    reserved_tokens: int | None = 512


def costs_of(model: Roofline, gpu: Gpu) -> PairCosts:
    """The costs of a pair, each engine on GPUs of its own. Raises ConfigError where the weights do not fit.

    A pass reads all weights once; a token takes 2 FLOPs per parameter; a pair of tokens that attend takes
    4 * heads * head_dim FLOPs per layer; a token's KV takes 2 * layers * kv_heads * head_dim numbers.
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
        DecodeCosts(pass_s, token_s, kv_bytes / bandwidth, capacity, reserved_tokens=model.reserved_tokens),
        TransferCosts(gpu.request_s, kv_bytes / (gpu.link * model.gpus)),
    )
