"""What was recorded of a model's experts, where they are placed, and how good that is (Gimbal,
section III.D).
"""

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
    """Counts of one model's routing (Gimbal, section III.D, equations 1 and 2).

    `activations` [layers, experts] is A: how often each expert was chosen. `transitions` [layers -
    1, experts, experts] is E: how often a token that chose expert j in a layer chose k in the next,
    all pairs of its top-k; zeros where only activations were recorded. The layers are those that
    have experts and saw a token; `layers` are their numbers in the model, which has `model_layers`.
    `record_of` makes it.
    """

    activations: Counts
    transitions: Counts
    layers: Sequence[int]
    model_layers: int

    @property
    def experts(self) -> int:
        """Experts in each layer, m in the paper."""
        return int(self.activations.shape[1])

    @property
    def has_transitions(self) -> bool:
        """Whether it is known which expert followed which."""
        return bool(self.transitions.any())


def record_of(
    activations: NDArray[np.integer], transitions: NDArray[np.integer] | None = None
) -> ExpertRecord:
    """The record of a whole model's counts, [layers, experts] and [layers - 1, experts, experts].

    Layers without a count are left out: they have no experts, as the first layers of DeepSeek's
    models, or saw no token. `transitions[i]` lead from layer i to the next layer that has experts.
    ValueError where these are no such counts, or nothing was counted at all.
    """
    counted = np.asarray(activations, dtype=np.float64)
    if counted.ndim != 2:
        raise ValueError(f"activations must be [layers, experts], not {list(counted.shape)}")
    model_layers, experts = counted.shape
    shape = (max(0, model_layers - 1), experts, experts)
    if transitions is None:
        followed = np.zeros(shape)
    else:
        followed = np.asarray(transitions, dtype=np.float64)
    if followed.shape != shape:
        raise ValueError(f"transitions must be {list(shape)}, not {list(followed.shape)}")
    for name, counts in (("activations", counted), ("transitions", followed)):
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise ValueError(f"{name} must be counts from 0 on")
    layers = np.flatnonzero(counted.sum(axis=1))
    if not len(layers):
        raise ValueError("no activation was counted")
    return ExpertRecord(
        counted[layers], followed[layers[:-1]], tuple(map(int, layers)), model_layers
    )


Gpus = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Placement:
    """Every expert of every layer on one of `gpus` GPUs: `gpu_of` [layers, experts], the same
    number on each (3, 4).

    No expert has a copy. The paper partitions the experts once for all layers; SGLang maps each
    layer on its own, which lets a layer be balanced without unbalancing another, so layers may
    differ here.
    """

    gpus: int
    gpu_of: Gpus

    @cached_property
    def on(self) -> Counts:
        """x [layers, experts, gpus]: 1 where the expert is on the GPU, else 0."""
        return np.eye(self.gpus)[self.gpu_of]

    @property
    def slots(self) -> Gpus:
        """SGLang's `physical_to_logical_map` [layers, experts]: which expert each slot holds, GPU
        0's slots first.
        """
        return np.argsort(self.gpu_of, axis=1, kind="stable")


def placement_of_slots(slots: Gpus, gpus: int) -> Placement:
    """The placement that such a map means. ValueError for a row that does not name each expert
    once.
    """
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
            remedy=(
                "Give a number of GPUs that divides the number of experts; SGLang needs one too."
            ),
        )
    return experts // gpus


@dataclass(frozen=True, slots=True)
class Measures:
    """Of a placement on a record.

    `balance` is the load of a layer's fullest GPU over the mean of its GPUs, a mean over the
    layers: 1 is even, and the experts of a step take that many times as long as they need to.
    `worst_balance` is the highest of a layer. `deviation` is the paper's D (8, 9) as a share of the
    ideal load L_i: how far any GPU is above or below it. `traffic` is the share of the transitions
    that lead to another GPU (11), 0 where none were recorded.
    """

    balance: float
    worst_balance: float
    deviation: float
    traffic: float


def loads(record: ExpertRecord, placement: Placement) -> Counts:
    """L [layers, gpus]: the activations of each GPU's experts (7)."""
    return np.asarray((record.activations[:, None] @ placement.on)[:, 0])


def kept(record: ExpertRecord, placement: Placement) -> float:
    """The transitions that stay on their GPU.

    Per layer: from expert j of a layer to k of the next, each where it is placed in its own layer.
    Where all layers are placed alike this is what the cut of (11) leaves, with W made symmetric.
    """
    on = placement.on
    return float(((record.transitions @ on[1:]) * on[:-1]).sum())


def measures(record: ExpertRecord, placement: Placement) -> Measures:
    """How good `placement` is, if tokens are routed as in `record`."""
    load = loads(record, placement)
    ideal = load.mean(axis=1, keepdims=True)
    balance = load.max(axis=1) / ideal[:, 0]
    total = record.transitions.sum()
    return Measures(
        balance=float(balance.mean()),
        worst_balance=float(balance.max()),
        deviation=float((abs(load - ideal) / ideal).max()),
        traffic=float(1 - kept(record, placement) / total) if total else 0.0,
    )


def verdict(now: Measures, new: Measures, margin: float) -> tuple[bool, str]:
    """Whether `new` beats `now`, both on the same record, by `margin` in all; and the reason in
    words.

    The gain is the share of load that the fullest GPU loses and the share of transitions that no
    longer cross, added
    up: what one wins the other may lose.
    """
    gain = 1 - new.balance / now.balance + now.traffic - new.traffic
    change = (
        f"balance {now.balance:.3f} to {new.balance:.3f}, traffic {now.traffic:.1%} to "
        f"{new.traffic:.1%}"
    )
    if gain >= margin:
        return (True, change)
    return (False, f"a gain below {margin:.0%}: {change}")
