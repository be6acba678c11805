"""The SGLang versions and names that the plugin needs: looked up first, so that it is wholly on or wholly off."""

import inspect
import pkgutil
import re
from typing import Final

SUPPORTED = ">=0.5.16,<0.6"
_FIRST, _FIRST_NOT = (0, 5, 16), (0, 6)
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def is_supported(version: str) -> bool:
    """Whether `version` lies in `SUPPORTED`; pre-releases and builds count as their release."""
    release = _RELEASE.match(version)
    if release is None:
        return False
    return _FIRST <= tuple(int(part or 0) for part in release.groups()) < _FIRST_NOT


REQUEST: Final = "sglang.srt.managers.schedule_batch.Req.__init__"
KV_CLASS: Final = "sglang.srt.disaggregation.utils.get_kv_class"
ROOM_STATUS: Final = "sglang.srt.disaggregation.common.conn.CommonKVManager.check_status"
CALC_PRIORITY: Final = "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority"
LAUNCH_SERVER: Final = "sglang.srt.entrypoints.http_server.launch_server"

IN_EVERY_PROCESS: Final = (
    REQUEST,
    KV_CLASS,
    ROOM_STATUS,
    "sglang.srt.disaggregation.base.KVPoll.Failed",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry.HookType",
)
WHERE_HTTP_IS_SERVED: Final = (
    LAUNCH_SERVER,
    "sglang.srt.entrypoints.http_server.app.add_api_route",
    "sglang.srt.entrypoints.http_server.generate_request",
    "sglang.srt.entrypoints.http_server.GenerateReqInput.bootstrap_host",
    "sglang.srt.entrypoints.http_server.GenerateReqInput.bootstrap_port",
    "sglang.srt.entrypoints.http_server.GenerateReqInput.bootstrap_room",
    "sglang.srt.server_args.ServerArgs.disaggregation_mode",
    "sglang.srt.server_args.ServerArgs.disable_radix_cache",
    "sglang.srt.server_args.ServerArgs.speculative_algorithm",
    "sglang.srt.server_args.ServerArgs.tokenizer_worker_num",
)
RECORDER: Final = "sglang.srt.eplb.expert_distribution._ExpertDistributionRecorderReal"
WHERE_EXPERTS_ARE_RECORDED: Final = (
    f"{RECORDER}.__init__",
    f"{RECORDER}.recording",
    f"{RECORDER}.start_record",
    f"{RECORDER}.on_select_experts",
    f"{RECORDER}.dump_record",
    "sglang.srt.server_args.ServerArgs.expert_distribution_recorder_mode",
    "sglang.srt.server_args.ServerArgs.enable_two_batch_overlap",
)
NGRAM_WORKER: Final = "sglang.srt.speculative.ngram_worker.NGRAMWorker"
VERIFY: Final = "sglang.srt.speculative.ngram_worker.eagle_sample"
MOVE_ACCEPTED: Final = "sglang.srt.speculative.ngram_worker.move_accept_tokens_to_target_kvcache"
FIRST_INPUT: Final = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input"
WHERE_DRAFTS_ARE_VERIFIED: Final = (
    f"{NGRAM_WORKER}.__init__",
    f"{NGRAM_WORKER}.forward_batch_generation",
    f"{NGRAM_WORKER}.target_worker",
    f"{NGRAM_WORKER}._init_preallocated_tensors",
    f"{NGRAM_WORKER}._prepare_draft_tokens",
    f"{NGRAM_WORKER}._update_ngram_corpus",
    VERIFY,
    MOVE_ACCEPTED,
    FIRST_INPUT,
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias",
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.has_watermark_candidates",
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.sampling_mask_batch_indices",
    "sglang.srt.speculative.ngram_info.NgramVerifyInput",
)
OF_AN_NGRAM_WORKER: Final = ("draft_token_num", "enable_overlap", "model_runner", "speculative_num_draft_tokens")
"""Attributes that the worker's `__init__` sets."""
OF_A_DRAFTED_REQUEST: Final = (
    *("origin_input_ids_unpadded", "output_ids", "sampling_params", "spec_verify_ct"),
    *("custom_logit_processor", "grammar", "return_hidden_states", "return_logprob"),
)
"""Attributes that `Req.__init__` sets."""
OF_A_RECORDER: Final = ("_expert_location_metadata", "_current_layer_idx", "_disable_all")
"""Attributes that the recorder's `__init__` sets."""
OF_A_REQUEST: Final = ("bootstrap_host", "bootstrap_port", "positional_embed_overrides", "skip_radix_cache_insert")
"""Attributes that `Req.__init__` sets; no class has them, so they are looked for in its code."""


def missing_names(*, serves_http: bool) -> list[str]:
    """What this SGLang lacks of what the plugin needs in this process. Imports the modules that it hooks."""
    needed = (*IN_EVERY_PROCESS, *(WHERE_HTTP_IS_SERVED if serves_http else ()))
    missing = [name for name in needed if not _is_found(name)]
    return missing if REQUEST in missing else missing + _not_set(REQUEST, OF_A_REQUEST)


def missing_of_recorder() -> list[str]:
    """What this SGLang lacks of what recording experts needs. Imports the recorder."""
    missing = [name for name in WHERE_EXPERTS_ARE_RECORDED if not _is_found(name)]
    init = f"{RECORDER}.__init__"
    return missing if init in missing else missing + _not_set(init, OF_A_RECORDER)


def missing_of_drafts() -> list[str]:
    """What this SGLang lacks of what drafted decoding needs. Imports the NGRAM worker."""
    missing = [name for name in WHERE_DRAFTS_ARE_VERIFIED if not _is_found(name)]
    init = f"{NGRAM_WORKER}.__init__"
    missing += [] if init in missing else _not_set(init, OF_AN_NGRAM_WORKER)
    return missing + _not_set(REQUEST, OF_A_DRAFTED_REQUEST)


def has_waiting_queue() -> bool:
    """Whether this SGLang's waiting queue is where it can be reordered."""
    return _is_found(CALC_PRIORITY)


def _is_found(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def _not_set(init: str, attributes: tuple[str, ...]) -> list[str]:
    """Those of `attributes` that the `__init__` at this name does not set."""
    code = getattr(inspect.unwrap(pkgutil.resolve_name(init)), "__code__", None)
    of = init.split(".")[-2]
    return [f"{of}.{name}" for name in attributes if code is None or name not in code.co_names]
