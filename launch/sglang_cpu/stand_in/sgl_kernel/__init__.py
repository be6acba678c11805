"""Stands in for SGLang's kernel package on a machine without a GPU.

The real one cannot load without a CUDA driver. SGLang's CPU path imports some `*_cpu` kernels by
name when it starts, and takes pure PyTorch instead of them when they are not registered, as they
are not here. Those that speculation calls are at the end.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: it stands in for the CUDA package"
        )

    def missing(*_arguments: Any, **_named: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} has no implementation here: this sgl_kernel is a stand-in"
        )

    return missing


def assign_req_to_token_pool_cpu(
    rows: Any, slots_of: Any, begins: Any, ends: Any, slots: Any, _width: int
) -> None:
    """Write `slots`, those of all requests in a row, to columns begins[i] to ends[i] of each
    request's row.
    """
    written = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        slots_of[row, begin:end] = slots[written : written + end - begin]
        written += end - begin


def assign_extend_cache_locs_cpu(
    rows: Any, slots_of: Any, begins: Any, ends: Any, slots: Any, _width: int
) -> None:
    """Read into `slots` what `assign_req_to_token_pool_cpu` writes."""
    read = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        slots[read : read + end - begin] = slots_of[row, begin:end]
        read += end - begin


def copy_all_layer_kv_cache_cpu(addresses: Any, strides: Any, targets: Any, sources: Any) -> None:
    """Copy slots of every buffer, given by its address and its bytes per slot; all are read before
    any is written.
    """
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(address + source * stride, stride) for source in sources.tolist()]
        for target, slot in zip(targets.tolist(), slots, strict=True):
            ctypes.memmove(address + target * stride, slot, stride)
