"""The plugin that adds to unmodified SGLang what Faster-MoA needs of a prefill engine.

SGLang calls `register` in every one of its processes (entry point group `sglang.srt.plugins`). This
package runs in those processes: of the router it imports `core.drafts` and `experts.placement`, and
SGLang only in the functions that need it.
"""

import logging
import multiprocessing
from importlib.metadata import PackageNotFoundError, version

from shell_router.sglang_plugin import drafts, experts, patches, routes, waiting_queue
from shell_router.sglang_plugin.compatibility import SUPPORTED, Feature, is_supported

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks that this process needs.

    Under an SGLang that it does not fit it logs an error and changes nothing.
    """
    installed = find_sglang_version()
    if not is_supported(installed):
        _stay_off(f"supports sglang {SUPPORTED}, not {installed}")
        return
    serves_http = multiprocessing.parent_process() is None
    needed = [patches.make_feature(), *([routes.FEATURE] if serves_http else [])]
    if missing := [name for feature in needed for name in feature.missing()]:
        _stay_off(f"finds no {', '.join(missing)} in sglang {installed}")
        return
    for feature in needed:
        feature.register()
    without = f"updates do not yield to prompts, and {waiting_queue.VARIABLE} has no effect"
    _register_part(
        waiting_queue.make_feature(waiting_queue.read_age_s()), without, "or go on without"
    )
    file = experts.record_file()
    algorithm = experts.read_algorithm()
    if file is not None or algorithm is not None:
        variables = f"{experts.RECORD_FILE} and {experts.PLACEMENT}"
        _register_part(
            experts.make_feature(file, algorithm),
            "records and places no experts",
            f"or leave {variables} unset",
        )
    if drafts.drafts_enabled() and not serves_http:
        plain = f"or start decode without {drafts.VARIABLE} and without speculation"
        if not _register_part(drafts.make_feature(), "drafts nothing", plain):
            _end()


def _stay_off(reason: str) -> None:
    logger.error(
        "The shell_router plugin %s, and stays off: prefill-only requests will cost a KV "
        "transfer each. Install a version that docs/reference/sglang.md says was tried, or set "
        "SGLANG_PLUGINS to leave the plugin out.",
        reason,
    )
    if drafts.drafts_enabled() and multiprocessing.parent_process() is not None:
        _end()


def _end() -> None:
    """End a server that should draft and cannot, because its first request would end it anyway."""
    raise SystemExit(
        f"{drafts.VARIABLE} is set, and this SGLang cannot draft: the reason is in the log."
    )


def _register_part(feature: Feature, without: str, otherwise: str) -> bool:
    """Register `feature` if this SGLang fits it, else log an error; return whether it fits."""
    if missing := feature.missing():
        logger.error(
            "The shell_router plugin finds no %s in this SGLang, and %s. Install a version that "
            "docs/reference/sglang.md says was tried, %s.",
            ", ".join(missing),
            without,
            otherwise,
        )
    else:
        feature.register()
    return not missing


def find_sglang_version() -> str:
    """Return the installed version of SGLang, or `unknown` for a source tree."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"
