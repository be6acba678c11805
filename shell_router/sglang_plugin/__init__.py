"""Extends unmodified SGLang, through its own plugin framework, by what Faster-MoA asks of a prefill engine.

SGLang calls `register` in every one of its processes (entry point group `sglang.srt.plugins`). This package runs there:
of the router it imports `core.drafts` alone, and SGLang only where a function needs it. See docs/reference/sglang.md.
"""

import logging
import multiprocessing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shell_router.sglang_plugin import drafts
from shell_router.sglang_plugin.compatibility import (
    CALC_PRIORITY,
    FIRST_INPUT,
    KV_CLASS,
    LAUNCH_SERVER,
    MOVE_ACCEPTED,
    NGRAM_WORKER,
    RECORDER,
    REQUEST,
    ROOM_STATUS,
    SUPPORTED,
    VERIFY,
    has_waiting_queue,
    is_supported,
    missing_names,
    missing_of_drafts,
    missing_of_recorder,
)
from shell_router.sglang_plugin.experts import RECORD_FILE, ExpertCounter, record_file
from shell_router.sglang_plugin.patches import (
    MAKERS,
    PIN,
    as_it_is,
    has_accelerator,
    index_on_host_without_cuda,
    keep_prefill_only_kv,
    status_of_room,
    unpinned,
)
from shell_router.sglang_plugin.routes import add_routes
from shell_router.sglang_plugin.waiting_queue import VARIABLE, asked_age_s, shortest_prefill_first

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks that this process needs. Logs an error and changes nothing under an SGLang it does not fit."""
    found = installed_sglang()
    serves_http = multiprocessing.parent_process() is None  # the others need not load its code
    if not is_supported(found):
        _stay_off(f"supports sglang {SUPPORTED}, not {found}")
    elif missing := missing_names(serves_http=serves_http):
        _stay_off(f"finds no {', '.join(missing)} in sglang {found}")
    else:
        _register_hooks(serves_http=serves_http)


def _stay_off(reason: str) -> None:
    logger.error(
        "The shell_router plugin %s, and stays off: prefill-only requests will cost a KV transfer each. Install a "
        "version that docs/reference/sglang.md says was tried, or set SGLANG_PLUGINS to leave the plugin out.",
        reason,
    )


def installed_sglang() -> str:
    """The version of SGLang that is installed here, `unknown` for a source tree that was not installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def _register_hooks(*, serves_http: bool) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(REQUEST, keep_prefill_only_kv, HookType.AFTER)
    HookRegistry.register(KV_CLASS, index_on_host_without_cuda, HookType.AFTER)
    HookRegistry.register(ROOM_STATUS, status_of_room, HookType.AROUND)
    if not has_accelerator():
        for make in MAKERS:
            HookRegistry.register(make, unpinned, HookType.AROUND)
        HookRegistry.register(PIN, as_it_is, HookType.AROUND)
    if (age_s := asked_age_s()) is not None:
        if has_waiting_queue():
            HookRegistry.register(CALC_PRIORITY, shortest_prefill_first(age_s), HookType.AFTER)
        else:
            logger.error("%s has no effect: this sglang's waiting queue is not where it was.", VARIABLE)
    if serves_http:
        HookRegistry.register(LAUNCH_SERVER, add_routes, HookType.BEFORE)
    if (file := record_file()) is not None:
        _register_recording(HookRegistry, HookType, file)
    if drafts.asked() and not serves_http:
        _register_drafts(HookRegistry, HookType)


def _register_recording(registry: Any, kind: Any, file: Path) -> None:
    """The hooks that count which experts follow which."""
    if missing := missing_of_recorder():
        logger.error(
            "The shell_router plugin finds no %s in this SGLang, and records no experts. Install a version that "
            "docs/reference/sglang.md says was tried, or leave %s unset.",
            ", ".join(missing),
            RECORD_FILE,
        )
        return
    counter = ExpertCounter(file)
    registry.register(f"{RECORDER}.__init__", counter.make_counts, kind.AFTER)
    registry.register(f"{RECORDER}.start_record", counter.clear, kind.AFTER)
    registry.register(f"{RECORDER}.on_select_experts", counter.count, kind.AROUND)
    registry.register(f"{RECORDER}.dump_record", counter.write, kind.AROUND)


def _register_drafts(registry: Any, kind: Any) -> None:
    """The hooks that let NGRAM speculation verify our drafts; of no effect in a server without it."""
    if missing := missing_of_drafts():
        logger.error(
            "The shell_router plugin finds no %s in this SGLang, and drafts nothing. Install a version that "
            "docs/reference/sglang.md says was tried, or start decode without %s and without speculation.",
            ", ".join(missing),
            drafts.VARIABLE,
        )
        return
    decoding = drafts.DraftedDecoding()
    registry.register(f"{NGRAM_WORKER}.__init__", drafts.refuse_overlap, kind.AFTER)
    registry.register(f"{NGRAM_WORKER}.forward_batch_generation", decoding.run, kind.AROUND)
    registry.register(f"{NGRAM_WORKER}._prepare_draft_tokens", decoding.chains, kind.AROUND)
    registry.register(f"{NGRAM_WORKER}._update_ngram_corpus", drafts.learn_nothing, kind.AROUND)
    registry.register(FIRST_INPUT, drafts.first_input, kind.AROUND)
    registry.register(MOVE_ACCEPTED, drafts.stay_in_place, kind.AROUND)
    registry.register(VERIFY, decoding.sample_and_compare, kind.AROUND)
