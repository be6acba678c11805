"""Pinned memory on a machine without an accelerator: there is none, and LoRA layers cannot do without asking for it.

SGLang keeps adapters and their offsets in pinned memory (`lora/layers.py`, `lora/backend/torch_backend.py`). Without an
accelerator PyTorch refuses to pin, which ends a server with `--enable-lora` while it loads its model.
"""

from collections.abc import Callable
from typing import Any, Final

MAKERS: Final = ("torch.tensor", "torch.zeros")
"""Functions that SGLang's adapters ask for pinned memory."""
PIN: Final = "torch.Tensor.pin_memory"


def has_accelerator() -> bool:
    """Whether there is a device for which memory could be pinned."""
    import torch

    return torch.accelerator.is_available()


def unpinned(make: Callable[..., Any], *arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
    """Around a function that makes a tensor: in ordinary memory."""
    return make(*arguments, **named)


def as_it_is(_pin: Callable[..., Any], tensor: Any, *_arguments: Any, **_named: Any) -> Any:
    """Around `Tensor.pin_memory`: the tensor stays where it is."""
    return tensor
