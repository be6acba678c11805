"""Extends unmodified SGLang, through its own plugin framework, by what Faster-MoA asks of a prefill engine.

SGLang calls `register` in every one of its processes (entry point group `sglang.srt.plugins`). This package runs there:
it imports nothing of the router, and SGLang only where a function needs it. docs/sglang.md says what it changes.
"""

import logging
import multiprocessing
from importlib.metadata import PackageNotFoundError, version

from shell_router.sglang_plugin.kv_transfer import index_on_host_without_cuda, status_of_room
from shell_router.sglang_plugin.prefix_cache import keep_prefill_only_kv
from shell_router.sglang_plugin.routes import add_routes
from shell_router.sglang_plugin.versions import SUPPORTED, is_supported

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks that this process needs. Logs an error and changes nothing under another SGLang."""
    found = installed_sglang()
    if not is_supported(found):
        logger.error(
            "The shell_router plugin supports sglang %s, not %s, and stays off: prefill-only requests will cost a KV "
            "transfer each. Install a supported version, or set SGLANG_PLUGINS to leave the plugin out.",
            SUPPORTED,
            found,
        )
        return
    _register_hooks()


def installed_sglang() -> str:
    """The version of SGLang that is installed here, `unknown` for a source tree that was not installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    after, around, before = HookType.AFTER, HookType.AROUND, HookType.BEFORE
    HookRegistry.register("sglang.srt.managers.schedule_batch.Req.__init__", keep_prefill_only_kv, after)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", index_on_host_without_cuda, after)
    HookRegistry.register("sglang.srt.disaggregation.common.conn.CommonKVManager.check_status", status_of_room, around)
    if multiprocessing.parent_process() is None:  # the process that serves HTTP; the others need not load its code
        HookRegistry.register("sglang.srt.entrypoints.http_server.launch_server", add_routes, before)
