"""The plugin's hooks into prefix cache, KV transfer and pinned memory."""

import logging
from collections.abc import Callable
from typing import Any, Final

from shell_router.sglang_plugin.compatibility import REQUEST, Feature

logger = logging.getLogger(__name__)


def make_unpinned(
    make: Callable[..., Any], *arguments: Any, pin_memory: bool = False, **keywords: Any
) -> Any:
    """Make a tensor in ordinary memory. Runs around the functions of torch that make tensors."""
    return make(*arguments, **keywords)


def keep_unpinned(_pin: Callable[..., Any], tensor: Any, *_arguments: Any, **_keywords: Any) -> Any:
    """Return the tensor unchanged. Runs around `Tensor.pin_memory`."""
    return tensor


def index_on_host_without_cuda(kv_class: Any, *_arguments: Any, **_keywords: Any) -> None:
    """Let a KV sender pin host memory through CUDA only if there is CUDA.

    Runs after `get_kv_class`. In 0.5.23 `MooncakeKVSender.supports_host_tensor_indices` makes the
    prefill scheduler copy KV indices into pinned memory, which ends it at the first transfer on a
    CPU.
    """
    if getattr(kv_class, "supports_host_tensor_indices", False):
        import torch

        kv_class.supports_host_tensor_indices = torch.cuda.is_available()


def check_room_status(check_status: Callable[..., Any], transfers: Any, room: int) -> Any:
    """Return Failed for a room that has just been cleared, instead of raising KeyError.

    Runs around `CommonKVManager.check_status`. A transfer thread asks whether a room is known and
    then for its status. When the scheduler clears the room in between, the KeyError ends the
    thread, and every later transfer on its queue stalls. `Failed` makes the thread drop what it
    holds for that room, which is over.
    """
    try:
        return check_status(transfers, room)
    except KeyError:
        logger.info("KV transfer: room %s was cleared while a thread looked at it", room)
        from sglang.srt.disaggregation.base import KVPoll

        return KVPoll.Failed


FAKE_BOOTSTRAP_HOST: Final = "2.2.2.2"
"""SGLang's mark of a prefill without a decode partner.

See `disaggregation.utils.FAKE_BOOTSTRAP_HOST`.
"""

PREFILL_ONLY_PORT: Final = -0x5348454C4C
"""The bootstrap port of our prefill-only requests.

SGLang carries a request's port to its scheduler and, for the fake host, never connects to it; no
other client sends a negative port.
"""


def keep_prefill_only_kv(_made: None, request: Any, *_arguments: Any, **_keywords: Any) -> None:
    """Let our prefill-only requests, and no others, into the radix cache.

    Runs after `Req.__init__`. SGLang bars every request with the fake host, since its own are
    warm-ups; ours are prefixes that a request will need. A prompt with overridden embeddings stays
    out: its KV does not follow from its token ids.
    """
    if is_ours(request) and request.positional_embed_overrides is None:
        request.skip_radix_cache_insert = False


def is_ours(request: Any) -> bool:
    """Return whether `request` is a prefill-only request of ours."""
    return bool(
        request.bootstrap_host == FAKE_BOOTSTRAP_HOST
        and request.bootstrap_port == PREFILL_ONLY_PORT
    )


def make_feature() -> Feature:
    """Return the hooks of every process.

    Without a device to pin memory for, SGLang's adapters must not ask for pinned memory.
    """
    import torch

    pinning = (
        ("torch.tensor", make_unpinned, "AROUND"),
        ("torch.zeros", make_unpinned, "AROUND"),
        ("torch.Tensor.pin_memory", keep_unpinned, "AROUND"),
    )
    return Feature(
        hooks=(
            (REQUEST, keep_prefill_only_kv, "AFTER"),
            ("sglang.srt.disaggregation.utils.get_kv_class", index_on_host_without_cuda, "AFTER"),
            (
                "sglang.srt.disaggregation.common.conn.CommonKVManager.check_status",
                check_room_status,
                "AROUND",
            ),
            *(() if torch.accelerator.is_available() else pinning),
        ),
        needs=(
            "sglang.srt.disaggregation.base.KVPoll.Failed",
            "sglang.srt.plugins.hook_registry.HookRegistry.register",
            "sglang.srt.plugins.hook_registry.HookType",
        ),
        sets={
            REQUEST: (
                "bootstrap_host",
                "bootstrap_port",
                "positional_embed_overrides",
                "skip_radix_cache_insert",
            )
        },
    )
