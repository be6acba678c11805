"""Where experts live."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shell_router.errors import ConfigError
from shell_router.placement.record import Counts

Gpus = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Placement:
    """Every expert of every layer on one of `gpus` GPUs: `gpu_of` [layers, experts], the same number on each (3, 4).

    No expert has a copy. The paper partitions the experts once for all layers; SGLang maps each layer on its own, which
    lets a layer be balanced without unbalancing another, so layers may differ here. ValueError where the numbers per
    GPU differ.
    """

    gpus: int
    gpu_of: Gpus

    def __post_init__(self) -> None:
        expected = np.full(self.gpus, self.gpu_of.shape[1] / self.gpus)
        for layer, row in enumerate(self.gpu_of):
            if row.min() < 0 or row.max() >= self.gpus or (np.bincount(row, minlength=self.gpus) != expected).any():
                raise ValueError(f"layer {layer} does not have {expected[0]:g} experts on each of {self.gpus} GPUs")

    @cached_property
    def on(self) -> Counts:
        """x [layers, experts, gpus]: 1 where the expert is on the GPU, else 0."""
        return np.eye(self.gpus)[self.gpu_of]

    @property
    def slots(self) -> Gpus:
        """SGLang's `physical_to_logical_map` [layers, experts]: which expert each slot holds, GPU 0's slots first."""
        return np.argsort(self.gpu_of, axis=1, kind="stable")


def placement_of_slots(slots: Gpus, gpus: int) -> Placement:
    """The placement that such a map means. ValueError for a row that does not name each expert once."""
    layers, experts = slots.shape
    per_gpu = experts_per_gpu(experts, gpus)
    if (np.sort(slots, axis=1) != np.arange(experts)).any():
        raise ValueError(f"a layer does not name each of its {experts} experts once")
    gpu_of = np.empty_like(slots)
    np.put_along_axis(gpu_of, slots, np.tile(np.arange(experts) // per_gpu, (layers, 1)), axis=1)
    return Placement(gpus, gpu_of)


def experts_per_gpu(experts: int, gpus: int) -> int:
    """m/g of (4). Raises ConfigError where it is no whole number."""
    if gpus < 1 or experts % gpus:
        raise ConfigError(
            f"{experts} experts do not divide over {gpus} GPUs.",
            remedy="Give a number of GPUs that divides the number of experts; SGLang needs one too.",
        )
    return experts // gpus
