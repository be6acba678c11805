"""What a server says about itself: SGLang's `/server_info`, `/model_info`, `/v1/loads` and `/metrics`."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from shell_router.engines.embedded.causal_lm import CausalLm
from shell_router.engines.embedded.service import Loads
from shell_router.engines.embedded.settings import ServerSettings

VERSION = "embedded"


def server_info(settings: ServerSettings, lm: CausalLm, loads: Loads) -> dict[str, Any]:
    """Settings as they were resolved, under SGLang's names."""
    pair = settings.pair
    return {
        **asdict(pair),
        "served_model_name": pair.model_path,
        "tokenizer_path": pair.model_path,
        "port": settings.port,
        "disaggregation_mode": settings.mode,
        "disaggregation_bootstrap_port": settings.bootstrap_port,
        "context_length": lm.context_length,
        "max_total_num_tokens": pair.max_total_tokens,
        "max_req_input_len": min(lm.context_length, pair.max_total_tokens) - 1,
        "enable_metrics": True,
        "disable_radix_cache": False,
        "enable_lora": pair.lora is not None,
        "max_loaded_loras": pair.lora and pair.lora.room,
        "max_loras_per_batch": pair.lora and pair.lora.room,
        "max_lora_rank": pair.lora and pair.lora.max_rank,
        "version": VERSION,
        "internal_states": [{"num_running_reqs": loads.running, "num_waiting_reqs": loads.waiting}],
    }


def model_info(settings: ServerSettings, lm: CausalLm) -> dict[str, Any]:
    path = settings.pair.model_path
    return {
        "model_path": path,
        "served_model_name": path,
        "tokenizer_path": path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "disaggregation_mode": settings.mode,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": lm.model_type,
        "architectures": list(lm.architectures),
    }


def loads_report(settings: ServerSettings, loads: Loads, now: datetime) -> dict[str, Any]:
    """One data-parallel rank. Waiting counts the queue before the batch and, on decode, before the transfer."""
    return {
        "timestamp": now.isoformat(),
        "version": VERSION,
        "accelerator": settings.pair.device,
        "num_accelerators": 1,
        "loads": [
            {
                "timestamp": now.timestamp(),
                "dp_rank": 0,
                "num_running_reqs": loads.running,
                "num_waiting_reqs": loads.waiting + loads.decode_prealloc + loads.decode_transfer,
                "num_used_tokens": loads.used_tokens,
                "num_total_tokens": loads.used_tokens,
                "max_total_num_tokens": settings.pair.max_total_tokens,
                "max_running_requests": settings.pair.max_running_requests,
                "token_usage": round(_usage(settings, loads), 4),
                "cache_hit_rate": round(_hit_rate(loads), 4),
                "disaggregation": {
                    "mode": settings.mode,
                    "prefill_bootstrap_queue_reqs": 0,
                    "prefill_inflight_queue_reqs": loads.prefill_inflight,
                    "decode_prealloc_queue_reqs": loads.decode_prealloc,
                    "decode_transfer_queue_reqs": loads.decode_transfer,
                    "decode_retracted_queue_reqs": 0,
                },
                "queues": {"waiting": loads.waiting, "grammar": 0, "paused": 0, "retracted": 0},
            }
        ],
    }


def metrics_text(settings: ServerSettings, loads: Loads, adapters: int) -> str:
    """Prometheus text under SGLang's metric names and labels; `adapters` are loaded."""
    labels = f'model_name="{settings.pair.model_path}",engine_type="{settings.mode}"'
    lines: list[str] = []
    for name, (kind, value) in {**_metrics(settings, loads), **_adapter_metrics(settings, adapters)}.items():
        lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{labels}}} {value}"]
    return "\n".join(lines) + "\n"


def _metrics(settings: ServerSettings, loads: Loads) -> Mapping[str, tuple[str, float]]:
    return {
        "num_running_reqs": ("gauge", loads.running),
        "num_queue_reqs": ("gauge", loads.waiting),
        "num_used_tokens": ("gauge", loads.used_tokens),
        "token_usage": ("gauge", _usage(settings, loads)),
        "cache_hit_rate": ("gauge", _hit_rate(loads)),
        "kv_evictable_tokens": ("gauge", loads.evictable_tokens),
        "num_prefill_inflight_queue_reqs": ("gauge", loads.prefill_inflight),
        "num_decode_prealloc_queue_reqs": ("gauge", loads.decode_prealloc),
        "num_decode_transfer_queue_reqs": ("gauge", loads.decode_transfer),
        "prompt_tokens_total": ("counter", loads.prompt_tokens_total),
        "cached_tokens_total": ("counter", loads.cached_tokens_total),
        "generation_tokens_total": ("counter", loads.generated_tokens_total),
    }


def _adapter_metrics(settings: ServerSettings, adapters: int) -> Mapping[str, tuple[str, float]]:
    """As in SGLang, none without LoRA."""
    lora = settings.pair.lora
    if lora is None:
        return {}
    return {
        "lora_pool_slots_used": ("gauge", adapters),
        "lora_pool_slots_total": ("gauge", lora.room),
        "lora_pool_utilization": ("gauge", adapters / lora.room),
    }


def _usage(settings: ServerSettings, loads: Loads) -> float:
    return loads.used_tokens / settings.pair.max_total_tokens


def _hit_rate(loads: Loads) -> float:
    """Of all prompt tokens since start; SGLang reports its last logging interval."""
    return loads.cached_tokens_total / loads.prompt_tokens_total if loads.prompt_tokens_total else 0.0
