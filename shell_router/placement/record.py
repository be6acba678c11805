"""What was recorded of a model's experts: how often each was activated, and which of the next layer followed it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]
"""Whole numbers, as floats: sums are exact, and products of matrices fast."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRecord:
    """Counts of one model's routing (Gimbal, section III.D, equations 1 and 2).

    `activations` [layers, experts] is A: how often each expert was chosen. `transitions` [layers - 1, experts, experts]
    is E: how often a token that chose expert j in a layer chose k in the next, all pairs of its top-k; zeros where only
    activations were recorded. The layers are those that have experts and saw a token; `layers` are their numbers in the
    model, which has `model_layers`. ValueError where the shapes do not fit each other.
    """

    activations: Counts
    transitions: Counts
    layers: Sequence[int]
    model_layers: int

    def __post_init__(self) -> None:
        if self.activations.ndim != 2 or not self.activations.size:
            raise ValueError(f"activations must be [layers, experts], not {list(self.activations.shape)}")
        wanted = (len(self.activations) - 1, self.experts, self.experts)
        if self.transitions.shape != wanted:
            raise ValueError(f"transitions must be {list(wanted)}, not {list(self.transitions.shape)}")
        for name, counts in (("activations", self.activations), ("transitions", self.transitions)):
            if not np.isfinite(counts).all() or (counts < 0).any():
                raise ValueError(f"{name} must be counts from 0 on")
        if len(self.layers) != len(self.activations) or not set(self.layers) <= set(range(self.model_layers)):
            raise ValueError(f"layers must name {len(self.activations)} of the model's {self.model_layers} layers")

    @property
    def experts(self) -> int:
        """Experts in each layer, m in the paper."""
        return int(self.activations.shape[1])

    @property
    def has_transitions(self) -> bool:
        """Whether it is known which expert followed which."""
        return bool(self.transitions.any())

    @property
    def affinity(self) -> Counts:
        """W [experts, experts]: the transitions of all layers together (2)."""
        return np.asarray(self.transitions.sum(axis=0))


def record_of(activations: NDArray[np.integer], transitions: NDArray[np.integer] | None = None) -> ExpertRecord:
    """The record of a whole model's counts, [layers, experts] and [layers - 1, experts, experts].

    Layers without a count are left out: they have no experts, as the first layers of DeepSeek's models, or saw no
    token. `transitions[i]` lead from layer i to the next layer that has experts. ValueError as for ExpertRecord, and
    where nothing was counted at all.
    """
    counted = np.asarray(activations, dtype=np.float64)
    if counted.ndim != 2:
        raise ValueError(f"activations must be [layers, experts], not {list(counted.shape)}")
    layers = np.flatnonzero(counted.sum(axis=1))
    if not len(layers):
        raise ValueError("no activation was counted")
    model_layers, experts = counted.shape
    shape = (model_layers - 1, experts, experts)
    followed = np.zeros(shape) if transitions is None else np.asarray(transitions, dtype=np.float64)
    if followed.shape != shape:
        raise ValueError(f"transitions must be {list(shape)}, not {list(followed.shape)}")
    return ExpertRecord(counted[layers], followed[layers[:-1]], tuple(map(int, layers)), model_layers)
