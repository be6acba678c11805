"""Costs of engines that nobody has measured, from what their GPU can do and what their model is."""

from dataclasses import dataclass
from math import inf

from shell_router.config.refusal import require
from shell_router.engines.simulated import DecodeCosts, PairCosts, PrefillCosts, TransferCosts


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: dense FLOP/s in the model's number format, bytes/s of memory, bytes of it, bytes/s to the next GPU.

    `compute_share` and `memory_share` say how much of both rates an engine reaches, `usable_share` how much of the
    memory it may fill, `pass_s` what a pass costs before any work, and `request_s` what a request costs on its way
    through the engines' processes.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float
    compute_share: float = 0.5
    memory_share: float = 0.7
    usable_share: float = 0.88
    pass_s: float = 0.0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "memory", "link"):
            require(0 < getattr(self, name) < inf, f"{name} must be above 0, not {getattr(self, name):g}")
        for name in ("compute_share", "memory_share", "usable_share"):
            require(0 < getattr(self, name) <= 1, f"{name} must be above 0 and at most 1, not {getattr(self, name):g}")
        times = (self.pass_s, self.request_s)
        require(all(0 <= one < inf for one in times), "pass_s and request_s must be at least 0")


@dataclass(frozen=True, slots=True)
class Roofline:
    """A dense transformer on `gpus` GPUs per engine, by tensor parallelism without loss.

    `reserved_tokens` are those of `DecodeCosts`, by default SGLang's.
    """

    gpu: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    bytes: int = 2
    gpus: int = 1
    chunk_tokens: int = 8192
    reserved_tokens: int | None = 512

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "heads", "kv_heads", "head_dim", "bytes", "gpus", "chunk_tokens"):
            require(0 < getattr(self, name) < inf, f"{name} must be above 0, not {getattr(self, name):g}")


def costs_of(model: Roofline, gpu: Gpu) -> PairCosts:
    """The costs of a pair, each engine on GPUs of its own. Raises ConfigError where the weights do not fit.

    A pass reads all weights once; a token takes 2 FLOPs per parameter; a pair of tokens that attend takes
    4 * heads * head_dim FLOPs per layer; a token's KV takes 2 * layers * kv_heads * head_dim numbers.
    """
    flops = gpu.flops * gpu.compute_share * model.gpus
    bandwidth = gpu.bandwidth * gpu.memory_share * model.gpus
    weights = model.parameters * model.bytes
    kv_bytes = 2 * model.layers * model.kv_heads * model.head_dim * model.bytes
    room = int((gpu.memory * gpu.usable_share * model.gpus - weights) / kv_bytes)
    require(room >= model.chunk_tokens, f"{weights / 1e9:.0f} GB of weights leave no room on {model.gpus} {model.gpu}")
    pass_s = gpu.pass_s + weights / bandwidth
    token_s = 2 * model.parameters / flops
    attention_s = 4 * model.heads * model.head_dim * model.layers / flops
    return PairCosts(
        PrefillCosts(pass_s, token_s, attention_s, model.chunk_tokens, cache_tokens=room),
        DecodeCosts(pass_s, token_s, kv_bytes / bandwidth, room, reserved_tokens=model.reserved_tokens),
        TransferCosts(gpu.request_s, kv_bytes / (gpu.link * model.gpus)),
    )
