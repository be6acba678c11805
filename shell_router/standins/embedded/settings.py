"""The settings of an embedded pair, and of one of its servers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shell_router.config.models import count
from shell_router.errors import ConfigError
from shell_router.topology.forms import ListOf, Number

Dtype = Literal["float32", "bfloat16", "float64"]
Mode = Literal["prefill", "decode"]

DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float64")
MODES: tuple[str, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """LoRA adapters on a pair: the most that each server loads at a time, and their highest rank."""

    max_loaded_adapters: int = 8
    max_rank: int = 64

    def __post_init__(self) -> None:
        for name in ("max_loaded_adapters", "max_rank"):
            _require_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class EmbeddedSection:
    """A prefill and a decode process that the router starts and ends itself; used where there are no `pairs`."""

    device: Annotated[str, "Where the model runs: `cpu`, `cuda`, `cuda:1`, ..."] = "cpu"
    dtype: Annotated[Dtype, "`float32`, `bfloat16`, or `float64`, whose outputs do not depend on batching."] = "float32"
    threads: Annotated[int, count("CPU threads of each of the two processes.")] = 1
    cores: Annotated[
        tuple[int, ...],
        ListOf(
            "CPU cores, counted from 0, that both processes run on (Linux); any by default.",
            Number("Core.", at_least=0, whole=True),
        ),
    ] = ()
    max_total_tokens: Annotated[
        int, count("KV capacity in tokens: of running requests, and on the prefill side again of its prefix cache.")
    ] = 65_536
    max_running_requests: Annotated[int, count("Requests that each process runs at a time.")] = 32
    draft_width: Annotated[
        int,
        Number("Most tokens per request of a pass with drafts; 1 drafts nothing.", at_least=1, at_most=16, whole=True),
    ] = 16


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
    draft_width: int = 16
    chunked_prefill_size: int = 512
    incremental_streaming_output: bool = False
    kv_wait_s: float = 300.0
    host: str = "127.0.0.1"
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown.", remedy=f"Choose one of {', '.join(DTYPES)}.")
        for name in (
            "threads",
            "max_total_tokens",
            "max_running_requests",
            "draft_width",
            "chunked_prefill_size",
            "kv_wait_s",
        ):
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
