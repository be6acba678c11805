"""KV transfer: what it needs on a machine without CUDA, and a race that would end it for good."""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def index_on_host_without_cuda(kv_class: Any, *_arguments: Any, **_named: Any) -> None:
    """After `get_kv_class`: a KV sender does not pin host memory through CUDA where there is no CUDA.

    In 0.5.23 `MooncakeKVSender.supports_host_tensor_indices` makes the prefill scheduler copy KV indices into pinned
    memory, which ends it at the first transfer on a CPU.
    """
    if getattr(kv_class, "supports_host_tensor_indices", False) and not _has_cuda():
        kv_class.supports_host_tensor_indices = False


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def status_of_room(check_status: Callable[..., Any], transfers: Any, room: int) -> Any:
    """Around `CommonKVManager.check_status`: a room that has just been cleared has failed, instead of a KeyError.

    A transfer thread asks whether a room is known and then for its status; when the scheduler clears the room in
    between, the KeyError ends the thread, and every later transfer on its queue waits for ever. `Failed` makes the
    thread drop what it holds for that room, which is over.
    """
    try:
        return check_status(transfers, room)
    except KeyError:
        logger.info("KV transfer: room %s was cleared while a thread looked at it", room)
        return _failed()


def _failed() -> Any:
    from sglang.srt.disaggregation.base import KVPoll

    return KVPoll.Failed
