"""Recorded expert choices, placements of experts, and their measures (Gimbal, section III.D)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shell_router.errors import ConfigError

Counts = NDArray[np.float64]
"""Whole numbers, as floats: sums are exact, and products of matrices fast."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRecord:
    """Counts of one model's routing (Gimbal, equations 1 and 2), made by `build_record`.

    Only layers that have experts and saw a token are counted.

    Attributes:
        activations: A [layers, experts]: how often each expert was chosen.
        transitions: E [layers - 1, experts, experts]: how often a token that chose expert j in a
            layer chose k in the next, over all pairs of its top-k. Zeros if only activations were
            recorded.
        layers: The layers' numbers in the model.
        model_layers: The number of layers that the model has.
    """

    activations: Counts
    transitions: Counts
    layers: Sequence[int]
    model_layers: int

    @property
    def experts(self) -> int:
        """The number of experts in each layer, m in the paper."""
        return int(self.activations.shape[1])

    @property
    def has_transitions(self) -> bool:
        """Whether transitions were recorded."""
        return bool(self.transitions.any())


def build_record(
    activations: NDArray[np.integer], transitions: NDArray[np.integer] | None = None
) -> ExpertRecord:
    """Build the record from the counts of a whole model.

    Layers without a count are left out: they have no experts, as the first layers of DeepSeek's
    models, or saw no token.

    Args:
        activations: Counts [layers, experts].
        transitions: Counts [layers - 1, experts, experts]; those of layer i lead to the next layer
            that has experts.

    Raises:
        ValueError: The arrays are no such counts, or nothing was counted.
    """
    chosen = np.asarray(activations, dtype=np.float64)
    if chosen.ndim != 2:
        raise ValueError(f"activations must be [layers, experts], not {list(chosen.shape)}")
    model_layers, experts = chosen.shape
    shape = (max(0, model_layers - 1), experts, experts)
    if transitions is None:
        followed = np.zeros(shape)
    else:
        followed = np.asarray(transitions, dtype=np.float64)
    if followed.shape != shape:
        raise ValueError(f"transitions must be {list(shape)}, not {list(followed.shape)}")
    for name, counts in (("activations", chosen), ("transitions", followed)):
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise ValueError(f"{name} must be counts from 0 on")
    layers = np.flatnonzero(chosen.sum(axis=1))
    if not len(layers):
        raise ValueError("no activation was counted")
    numbers = tuple(map(int, layers))
    return ExpertRecord(chosen[layers], followed[layers[:-1]], numbers, model_layers)


Gpus = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """A GPU for every expert of every layer, with equally many experts on each GPU (3, 4).

    No expert has a copy. The paper partitions the experts once for all layers. SGLang maps each
    layer on its own, so layers may differ here: a layer is balanced without unbalancing another.

    Attributes:
        gpus: The number of GPUs.
        gpu_of: The GPU of each expert [layers, experts].
    """

    gpus: int
    gpu_of: Gpus

    @cached_property
    def on(self) -> Counts:
        """The paper's x [layers, experts, gpus]: 1 if the expert is on the GPU, else 0."""
        return np.eye(self.gpus)[self.gpu_of]

    @property
    def slots(self) -> Gpus:
        """SGLang's `physical_to_logical_map` [layers, experts]: the expert in each slot.

        The slots of GPU 0 come first.
        """
        return np.argsort(self.gpu_of, axis=1, kind="stable")


def placement_from_slots(slots: Gpus, gpus: int) -> ExpertPlacement:
    """Read a `physical_to_logical_map` [layers, experts].

    Raises ValueError for a row that does not name each expert once.
    """
    layers, experts = slots.shape
    per_gpu = experts_per_gpu(experts, gpus)
    if (np.sort(slots, axis=1) != np.arange(experts)).any():
        raise ValueError(f"a layer does not name each of its {experts} experts once")
    gpu_of = np.empty_like(slots)
    np.put_along_axis(gpu_of, slots, np.tile(np.arange(experts) // per_gpu, (layers, 1)), axis=1)
    return ExpertPlacement(gpus, gpu_of)


def experts_per_gpu(experts: int, gpus: int) -> int:
    """Compute m/g of (4). Raises ConfigError unless it is a whole number."""
    if gpus < 1 or experts % gpus:
        raise ConfigError(
            f"{experts} experts do not divide over {gpus} GPUs.",
            remedy="Give a number of GPUs that divides the number of experts, as SGLang needs it.",
        )
    return experts // gpus


@dataclass(frozen=True, slots=True)
class Measures:
    """The quality of a placement on a record.

    Attributes:
        balance: The load of a layer's fullest GPU over the mean of its GPUs, averaged over the
            layers. 1 is even; the experts of a step take that many times as long as they need to.
        worst_balance: The highest balance of a layer.
        deviation: The paper's D (8, 9) as a share of the ideal load L_i: how far any GPU is above
            or below it.
        traffic: The share of the transitions that lead to another GPU (11); 0 if none were
            recorded.
    """

    balance: float
    worst_balance: float
    deviation: float
    traffic: float


def compute_loads(record: ExpertRecord, placement: ExpertPlacement) -> Counts:
    """Sum the activations of each GPU's experts: L [layers, gpus] (7)."""
    return np.asarray((record.activations[:, None] @ placement.on)[:, 0])


def count_kept(record: ExpertRecord, placement: ExpertPlacement) -> float:
    """Count the transitions that stay on their GPU.

    Expert j of a layer and k of the next are each on the GPU of their own layer's placement. If all
    layers are placed alike, the rest is the cut of (11), with W made symmetric.
    """
    on = placement.on
    return float(((record.transitions @ on[1:]) * on[:-1]).sum())


def measure_placement(record: ExpertRecord, placement: ExpertPlacement) -> Measures:
    """Measure the placement for tokens that are routed as in `record`."""
    load = compute_loads(record, placement)
    ideal = load.mean(axis=1, keepdims=True)
    balance = load.max(axis=1) / ideal[:, 0]
    total = record.transitions.sum()
    traffic = 0.0
    if total:
        traffic = float(1 - count_kept(record, placement) / total)
    return Measures(
        balance=float(balance.mean()),
        worst_balance=float(balance.max()),
        deviation=float((abs(load - ideal) / ideal).max()),
        traffic=traffic,
    )


def judge_gain(now: Measures, new: Measures, margin: float) -> tuple[bool, str]:
    """Decide whether `new` beats `now`, both on the same record, by `margin`.

    The gain is the share of load that the fullest GPU loses plus the share of transitions that no
    longer cross: one may lose what the other wins. Returns the decision and its reason in words.
    """
    gain = 1 - new.balance / now.balance + now.traffic - new.traffic
    change = (
        f"balance {now.balance:.3f} to {new.balance:.3f}, traffic {now.traffic:.1%} to "
        f"{new.traffic:.1%}"
    )
    if gain >= margin:
        return (True, change)
    return (False, f"a gain below {margin:.0%}: {change}")
