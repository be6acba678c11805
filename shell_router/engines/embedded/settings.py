"""What an embedded pair may be told, and what one of its servers is told."""

from dataclasses import dataclass
from typing import Literal

from shell_router.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float64"]
Mode = Literal["prefill", "decode"]

DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float64")
MODES: tuple[str, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """LoRA adapters on a pair: each server holds `room` of them at a time at most, of rank `max_rank` at most."""

    room: int = 8
    max_rank: int = 64

    def __post_init__(self) -> None:
        for name in ("room", "max_rank"):
            _require_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """One pair: a model folder and its limits.

    `model_path` is a Hugging Face folder of a causal LM with full attention (Qwen3, Llama). `context_length` counts
    prompt and output; None takes the model's own. `max_total_tokens` bounds, per server, the tokens of requests in
    work and, on the prefill server, separately those kept in the prefix cache. `kv_wait_s` is how long a finished
    prefill waits for its decode partner, and a decode for its KV. float64 makes outputs independent of batching and
    of how a prompt was cut into chunks. With `cores` both servers run on those CPU cores alone.
    Without `lora` adapters are refused, and the network is left as it is.
    """

    model_path: str
    device: str = "cpu"
    dtype: Dtype = "float32"
    threads: int = 1
    cores: tuple[int, ...] = ()
    context_length: int | None = None
    max_total_tokens: int = 65536
    max_running_requests: int = 32
    chunked_prefill_size: int = 512
    incremental_streaming_output: bool = False
    kv_wait_s: float = 300.0
    host: str = "127.0.0.1"
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown.", remedy=f"Choose one of {', '.join(DTYPES)}.")
        for name in ("threads", "max_total_tokens", "max_running_requests", "chunked_prefill_size", "kv_wait_s"):
            _require_positive(name, getattr(self, name))
        if self.context_length is not None:
            _require_positive("context_length", self.context_length)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server of a pair. Port 0 takes a free one; `bootstrap_port` is where a prefill server hands out KV."""

    pair: EmbeddedSettings
    mode: Mode
    port: int = 0
    bootstrap_port: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode {self.mode!r} is unknown.", remedy=f"Choose one of {', '.join(MODES)}.")


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{name} is {value}.", remedy="It must be greater than zero.")
