"""Placement algorithms by name: ours, SGLang's trivial placement and EPLB, Gimbal's Algorithm 3."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shell_router.errors import ConfigError
from shell_router.experts.placement.records import (
    Counts,
    ExpertPlacement,
    ExpertRecord,
    Gpus,
    compute_loads,
    count_kept,
    experts_per_gpu,
)

ANCHOR_GPU = 0
"""The GPU to which `gimbal` assigns experts of strong affinity; the paper's k."""

AFFINITY_PAIRS = 8
"""The number of pairs per layer that count as strong affinity."""


def contiguous(record: ExpertRecord, gpus: int) -> ExpertPlacement:
    """Place the first experts on the first GPU, and so on: `--init-expert-location trivial`."""
    per_gpu = experts_per_gpu(record.experts, gpus)
    row = np.arange(record.experts) // per_gpu
    return ExpertPlacement(gpus, np.tile(row, (len(record.activations), 1)))


def eplb(record: ExpertRecord, gpus: int) -> ExpertPlacement:
    """Place as SGLang's EPLB does on one node without redundant experts.

    Follows `--eplb-algorithm deepseek`; tests/sglang compares it with SGLang's own code.
    Layer by layer the most activated remaining expert goes to the GPU with the least load that is
    not full. It reads activations only.
    """
    per_gpu = experts_per_gpu(record.experts, gpus)
    rows = [pack_experts(row, gpus, per_gpu) for row in record.activations]
    return ExpertPlacement(gpus, np.array(rows))


def pack_experts(activations: Counts, gpus: int, per_gpu: int, placed: Gpus | None = None) -> Gpus:
    """Assign experts to the least loaded GPUs, the most activated expert first.

    Args:
        activations: Counts [experts].
        gpus: The number of GPUs.
        per_gpu: The number of experts that a GPU takes.
        placed: The GPU of each expert that has one already, -1 for the others [experts].

    Returns:
        The GPU of each expert [experts].
    """
    if placed is None:
        gpu_of = np.full(len(activations), -1)
    else:
        gpu_of = placed.copy()
    fixed = gpu_of >= 0
    load = np.bincount(gpu_of[fixed], activations[fixed], minlength=gpus)
    left = per_gpu - np.bincount(gpu_of[fixed], minlength=gpus)
    for expert in np.argsort(-activations, kind="stable"):
        if gpu_of[expert] < 0:
            gpu = int(np.argmin(np.where(left > 0, load, np.inf)))
            gpu_of[expert] = gpu
            load[gpu] += activations[expert]
            left[gpu] -= 1
    return gpu_of


def gimbal(record: ExpertRecord, gpus: int) -> ExpertPlacement:
    """Place by Gimbal's Algorithm 3, with `ANCHOR_GPU` for its k.

    The paper's M has the strongest pairs, `AFFINITY_PAIRS` per layer. A pair is left out of M if
    one of its experts does not fit on the anchor, as section III.D asks. Line 4 orders the
    remaining experts by A_ij, so each layer is placed on its own, and M holds a pair for its two
    layers only.
    """
    per_gpu = experts_per_gpu(record.experts, gpus)
    anchored = np.zeros(record.activations.shape, dtype=bool)
    links = record.transitions
    strongest = np.argsort(-links, axis=None, kind="stable")[: AFFINITY_PAIRS * len(links)]
    strongest = strongest[links.flat[strongest] > 0]
    for layer, first, second in zip(*np.unravel_index(strongest, links.shape), strict=True):
        fits = True
        for of_layer, expert in ((layer, first), (layer + 1, second)):
            if not anchored[of_layer, expert] and anchored[of_layer].sum() >= per_gpu:
                fits = False
        if fits:
            anchored[layer, first] = True
            anchored[layer + 1, second] = True
    rows = []
    for row, is_anchored in zip(record.activations, anchored, strict=True):
        placed = np.where(is_anchored, ANCHOR_GPU, -1)
        rows.append(pack_experts(row, gpus, per_gpu, placed))
    return ExpertPlacement(gpus, np.array(rows))


ROUNDING = 1e-6
"""Tolerance of the bounds, because the ideal load is not a whole number."""


def compute_pull(record: ExpertRecord, on: Counts, layer: int) -> Counts:
    """Count, per expert of a layer and GPU, the transitions that stay on the GPU with it.

    The paper's cut (11) is linear in the x of one layer, because transitions only connect
    neighboring layers.

    Args:
        record: The recorded counts.
        on: The placement as x [layers, experts, gpus], 1 where the expert is on the GPU.
        layer: The index of the layer in the record.

    Returns:
        Counts [experts, gpus].
    """
    pull = np.zeros(on.shape[1:])
    if layer > 0:
        pull += record.transitions[layer - 1].T @ on[layer - 1]
    if layer < len(on) - 1:
        pull += record.transitions[layer] @ on[layer + 1]
    return pull


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the highest load that each GPU of a layer may have."""

    low: float
    high: float

    def excess(self, load: Counts) -> Counts:
        """Compute how far each load is outside of the bounds; 0 within."""
        return np.asarray((load - self.high).clip(0) + (self.low - load).clip(0))

    def widen(self, share: float) -> "Bounds":
        """Widen both bounds by `share` of each."""
        return Bounds(self.low * (1 - share), self.high * (1 + share))


def compute_bounds(load: Counts) -> Bounds:
    """Bound a layer's loads so that it is balanced no worse than with EPLB's `load` [gpus].

    Balance is measured by the load of the fullest GPU, and by D (8, 9), the largest deviation from
    the ideal load.
    """
    ideal = load.mean()
    return Bounds(ideal - abs(load - ideal).max() - ROUNDING, load.max() + ROUNDING)


@dataclass(slots=True, eq=False)
class Layer:
    """A layer's experts on their GPUs, which its methods change by swaps of two experts.

    Swaps keep the number of experts per GPU. Each method swaps as long as a swap improves its
    measure. It ends, because no placement can come twice.

    Attributes:
        gpu_of: The GPU of each expert [experts].
        activations: Counts [experts].
        pull: See `compute_pull`.
    """

    gpu_of: Gpus
    activations: Counts
    pull: Counts

    @property
    def load(self) -> Counts:
        """The load of each GPU [gpus]."""
        return np.asarray(
            np.bincount(self.gpu_of, self.activations, minlength=self.pull.shape[1]),
            dtype=np.float64,
        )

    def level(self, bounds: Bounds) -> bool:
        """Bring every GPU's load within `bounds`; return whether that succeeded.

        The swap that relieves most for the transitions that it loses comes first.
        """
        while (excess := bounds.excess(self.load)).any():
            now = excess[self.gpu_of]
            relief = now[:, None] + now - bounds.excess(self._loads_after()).sum(axis=0)
            loss = -self._gain()
            merit = relief / (1 + loss - loss.min())
            if not self._swap(np.where(self._apart(), merit, 0.0)):
                return False
        return True

    def gather(self, bounds: Bounds) -> None:
        """Keep more transitions on their GPUs, with all loads within `bounds`; best swap first."""
        while True:
            leaves_bounds = bounds.excess(self._loads_after()).any(axis=0)
            if not self._swap(np.where(leaves_bounds, 0.0, self._gain())):
                return

    def even(self, bounds: Bounds) -> None:
        """Lower the highest load by swaps that lose no transition, within `bounds`.

        The swap that lowers it most comes first.
        """
        while True:
            load = self.load
            after = self._loads_after()
            fullest = load[self.gpu_of][:, None] == load.max()
            free = (self._gain() >= 0) & ~bounds.excess(after).any(axis=0)
            allowed = fullest & self._apart() & free
            if not self._swap(np.where(allowed, load.max() - after.max(axis=0), 0.0)):
                return

    def _gain(self) -> Counts:
        """Count the transitions that a swap of two keeps on their GPUs [experts, experts]."""
        there = self.pull[:, self.gpu_of]
        now = there.diagonal()
        return np.asarray(there + there.T - now - now[:, None])

    def _loads_after(self) -> Counts:
        """Compute the loads of both experts' GPUs after their swap [2, experts, experts]."""
        first = (self.load[self.gpu_of] - self.activations)[:, None] + self.activations
        return np.stack((first, first.T))

    def _apart(self) -> NDArray[np.bool_]:
        return np.asarray(self.gpu_of[:, None] != self.gpu_of)

    def _swap(self, merit: Counts) -> bool:
        """Swap the two experts of most merit; return False if no swap has any."""
        first, second = np.unravel_index(np.argmax(merit), merit.shape)
        if merit[first, second] <= 0:
            return False
        self.gpu_of[[first, second]] = self.gpu_of[[second, first]]
        return True


WIDENINGS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
"""Shares by which loads may exceed their bounds, step by step: first experts that follow each other
gather on a GPU, then the loads are evened out.
"""
SWEEPS = 8
LEAST_GAIN = 5e-4
"""The last sweep is the first that adds less than this share of transitions kept on a GPU."""


def swap(record: ExpertRecord, gpus: int) -> ExpertPlacement:
    """Cause less traffic than EPLB, with no layer balanced worse, by local search.

    Two searches start from EPLB's placement. One never leaves its bounds. The other widens them and
    narrows them again, and so finds groups that the first cannot reach. Both end within the bounds,
    and a sweep within the bounds never adds traffic, so the better search is no worse than EPLB in
    balance or in traffic. Then each layer's highest load is lowered as far as that adds no traffic.
    If no transitions were recorded, only this last step has an effect.
    """
    reference = eplb(record, gpus)
    bounds = [compute_bounds(load) for load in compute_loads(record, reference)]
    near = _Search(record, reference)
    far = _Search(record, reference)
    near.settle(bounds)
    for share in WIDENINGS:
        far.settle([bound.widen(share) for bound in bounds])
    best = max(near, far, key=lambda search: count_kept(record, search.placement))
    best.even(bounds)
    return best.placement


class _Search:
    """A placement that starts as `reference` and is improved layer by layer."""

    def __init__(self, record: ExpertRecord, reference: ExpertPlacement) -> None:
        self._record = record
        self._reference = reference
        self._gpu_of = reference.gpu_of.copy()
        self._on = reference.on.copy()

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement(self._reference.gpus, self._gpu_of)

    def settle(self, bounds: Sequence[Bounds]) -> None:
        """Sweep over the layers, back and forth, until a sweep gains little.

        The placement is within `bounds` afterwards if `reference` is.
        """
        order = list(range(len(self._gpu_of)))
        before = -np.inf
        for _ in range(SWEEPS):
            for number in order:
                layer = self._layer(number)
                if not layer.level(bounds[number]):
                    layer.gpu_of = self._reference.gpu_of[number].copy()
                layer.gather(bounds[number])
                self._put(number, layer)
            order.reverse()
            now = count_kept(self._record, self.placement)
            if now - before <= LEAST_GAIN * now:
                return
            before = now

    def even(self, bounds: Sequence[Bounds]) -> None:
        """Lower each layer's highest load as far as no transition is lost."""
        for number in range(len(self._gpu_of)):
            layer = self._layer(number)
            layer.even(bounds[number])
            self._put(number, layer)

    def _layer(self, number: int) -> Layer:
        pull = compute_pull(self._record, self._on, number)
        return Layer(self._gpu_of[number].copy(), self._record.activations[number], pull)

    def _put(self, number: int, layer: Layer) -> None:
        self._gpu_of[number] = layer.gpu_of
        self._on[number] = np.eye(self._reference.gpus)[layer.gpu_of]


Algorithm = Callable[[ExpertRecord, int], ExpertPlacement]

ALGORITHMS: Mapping[str, Algorithm] = {
    "swap": swap,
    "gimbal": gimbal,
    "eplb": eplb,
    "contiguous": contiguous,
}
"""Every placement algorithm by the name that commands and settings give it."""


def place(algorithm: str, record: ExpertRecord, gpus: int) -> ExpertPlacement:
    """Place the experts of `record` on `gpus` GPUs. Raises ConfigError for unknown algorithms."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"There is no placement algorithm {algorithm!r}.",
            remedy=f"Choose one of: {', '.join(ALGORITHMS)}.",
        )
    return ALGORITHMS[algorithm](record, gpus)
