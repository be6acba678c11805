"""The settings of an embedded pair, and of one of its servers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from shell_router.files.types import Count, Index

Dtype = Literal["float32", "bfloat16", "float64"]
Mode = Literal["prefill", "decode"]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
"""Variables of an embedded server's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSection:
    """A prefill and a decode process of the router's own; used where there are no `pairs`."""

    device: Annotated[str, "Where the model runs: `cpu`, `cuda`, `cuda:1`, ..."] = "cpu"
    dtype: Annotated[
        Dtype, "`float32`, `bfloat16`, or `float64`, whose outputs do not depend on batching."
    ] = "float32"
    threads: Annotated[Count, "CPU threads of each of the two processes."] = 1
    cores: Annotated[
        tuple[Index, ...],
        "CPU cores, counted from 0, that both processes run on (Linux); any by default.",
    ] = ()
    max_total_tokens: Annotated[
        Count,
        "KV capacity in tokens of running requests, and again of the prefix cache.",
    ] = 65_536
    max_running_requests: Annotated[Count, "Requests that each process runs at a time."] = 32
    draft_width: Annotated[
        int,
        "Most tokens per request of a pass with drafts; 1 drafts nothing.",
        Interval(ge=1, le=16),
    ] = 16


@dataclass(frozen=True, slots=True)
class EmbeddedSettings(EmbeddedSection):
    """One pair: a model folder and its limits.

    `model_path` is a Hugging Face folder of a causal LM with full attention (Qwen3, Llama).
    `context_length` counts prompt and output; None takes the model's own. `kv_wait_s` is how long a
    finished prefill waits for its decode partner, and a decode for its KV.
    """

    model_path: str
    context_length: int | None = None
    chunked_prefill_size: int = 512
    incremental_streaming_output: bool = False
    kv_wait_s: float = 300.0
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server of a pair. Port 0 takes a free port.

    A prefill server hands out KV at `bootstrap_port`.
    """

    pair: EmbeddedSettings
    mode: Mode
    port: int = 0
    bootstrap_port: int = 0
