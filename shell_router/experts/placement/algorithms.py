"""Placement algorithms, all by name: ours, SGLang's (its trivial placement, and EPLB), and Gimbal's
Algorithm 3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shell_router.errors import ConfigError
from shell_router.experts.placement.records import (
    Counts,
    ExpertRecord,
    Gpus,
    Placement,
    experts_per_gpu,
    kept,
    loads,
)

ANCHOR_GPU = 0
"""Where `gimbal` puts experts of strong affinity (its k): those of the strongest pairs,
`AFFINITY_PAIRS` per layer.
"""
AFFINITY_PAIRS = 8


def contiguous(record: ExpertRecord, gpus: int) -> Placement:
    """The first experts on the first GPU, and so on in every layer: `--init-expert-location
    trivial`.
    """
    per_gpu = experts_per_gpu(record.experts, gpus)
    row = np.arange(record.experts) // per_gpu
    return Placement(gpus, np.tile(row, (len(record.activations), 1)))


def eplb(record: ExpertRecord, gpus: int) -> Placement:
    """What SGLang's EPLB (`--eplb-algorithm deepseek`) does on one node without redundant experts;
    written anew here.

    Layer by layer the most activated expert that is left goes to the GPU with the least load that
    is not full. It reads activations only. tests/sglang holds it against SGLang's own code.
    """
    per_gpu = experts_per_gpu(record.experts, gpus)
    return Placement(gpus, np.array([packed(row, gpus, per_gpu) for row in record.activations]))


def packed(activations: Counts, gpus: int, per_gpu: int, placed: Gpus | None = None) -> Gpus:
    """The GPU of each expert [experts], most activations first: the least loaded that has fewer
    than `per_gpu`.

    `placed` has the GPUs of experts that have one already, -1 for the others.
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


def gimbal(record: ExpertRecord, gpus: int) -> Placement:
    """Algorithm 3, with `ANCHOR_GPU` for its k. M is made of the strongest pairs, `AFFINITY_PAIRS`
    of them per layer.

    A pair of which an expert does not fit on the anchor is left out of M, as section III.D asks.
    Line 4 orders the remaining experts by A_ij, so each layer is placed on its own, and M holds a
    pair for its two layers only.
    """
    per_gpu = experts_per_gpu(record.experts, gpus)
    anchored = np.zeros(record.activations.shape, dtype=bool)
    links = record.transitions
    strongest = np.argsort(-links, axis=None, kind="stable")[: AFFINITY_PAIRS * len(links)]
    strongest = strongest[links.flat[strongest] > 0]
    for layer, one, other in zip(*np.unravel_index(strongest, links.shape), strict=True):
        new = {expert for expert in ((layer, one), (layer + 1, other)) if not anchored[expert]}
        if all(
            anchored[of].sum() + sum(layer_ == of for layer_, _ in new) <= per_gpu
            for of in (layer, layer + 1)
        ):
            for expert in new:
                anchored[expert] = True
    rows = zip(record.activations, np.where(anchored, ANCHOR_GPU, -1), strict=True)
    return Placement(gpus, np.array([packed(row, gpus, per_gpu, placed) for row, placed in rows]))


ROUNDING = 1e-6
"""Loads are whole numbers; the ideal load is not."""


def pull_of(record: ExpertRecord, on: Counts, layer: int) -> Counts:
    """[experts, gpus]: the transitions that stay on a GPU if the expert is there, with the layers
    around it as in `on`.

    A layer's part of the cut (11) is linear in its own x, since experts of one layer never follow
    each other.
    """
    pull = np.zeros(on.shape[1:])
    if layer > 0:
        pull += record.transitions[layer - 1].T @ on[layer - 1]
    if layer < len(on) - 1:
        pull += record.transitions[layer] @ on[layer + 1]
    return pull


@dataclass(frozen=True, slots=True)
class Bounds:
    """The load that each GPU of a layer shall have."""

    low: float
    high: float

    def outside(self, load: Counts) -> Counts:
        """How far each load is outside; 0 within."""
        return np.asarray((load - self.high).clip(0) + (self.low - load).clip(0))

    def loosened(self, share: float) -> "Bounds":
        """Wider by `share` of each."""
        return Bounds(self.low * (1 - share), self.high * (1 + share))


def bounds_of(load: Counts) -> Bounds:
    """What a layer with EPLB's `load` [gpus] allows: the load of its fullest GPU, and D (8, 9)
    around the ideal.

    Within them a layer is worse in neither than by EPLB.
    """
    ideal = load.mean()
    return Bounds(ideal - abs(load - ideal).max() - ROUNDING, load.max() + ROUNDING)


@dataclass(slots=True, eq=False)
class Layer:
    """A layer's experts on their GPUs: `gpu_of`, `activations` [experts], and their `pull`
    [experts, gpus].

    The methods change `gpu_of`. Each swaps two experts as long as that is better, so that numbers
    per GPU stay equal, and ends, since no placement comes twice.
    """

    gpu_of: Gpus
    activations: Counts
    pull: Counts

    @property
    def load(self) -> Counts:
        """[gpus]."""
        return np.asarray(
            np.bincount(self.gpu_of, self.activations, minlength=self.pull.shape[1]),
            dtype=np.float64,
        )

    def level(self, bounds: Bounds) -> bool:
        """Bring every GPU's load within `bounds`, first by the swap that loses least for it.
        Whether it could.
        """
        while (outside := bounds.outside(self.load)).any():
            now = outside[self.gpu_of]
            relief = now[:, None] + now - bounds.outside(self._after()).sum(axis=0)
            loss = -self._gain()
            merit = relief / (1 + loss - loss.min())
            if not self._swap(np.where(self._apart(), merit, 0.0)):
                return False
        return True

    def gather(self, bounds: Bounds) -> None:
        """Keep more transitions on their GPUs, all loads within `bounds` as they were: the best
        swap first.
        """
        while self._swap(np.where(bounds.outside(self._after()).any(axis=0), 0.0, self._gain())):
            pass

    def even(self, bounds: Bounds) -> None:
        """Lower the highest load where that loses no transition, within `bounds`: what lowers it
        most first.
        """
        while True:
            load = self.load
            after = self._after()
            fullest = load[self.gpu_of][:, None] == load.max()
            free = (self._gain() >= 0) & ~bounds.outside(after).any(axis=0)
            if not self._swap(
                np.where(fullest & self._apart() & free, load.max() - after.max(axis=0), 0.0)
            ):
                return

    def _gain(self) -> Counts:
        """[experts, experts]: how many more transitions stay on their GPUs after a swap of the
        two."""
        there = self.pull[:, self.gpu_of]
        now = there.diagonal()
        return np.asarray(there + there.T - now - now[:, None])

    def _after(self) -> Counts:
        """[2, experts, experts]: the loads of the first's and of the second's GPU after a swap of
        the two.
        """
        first = (self.load[self.gpu_of] - self.activations)[:, None] + self.activations
        return np.stack((first, first.T))

    def _apart(self) -> NDArray[np.bool_]:
        return np.asarray(self.gpu_of[:, None] != self.gpu_of)

    def _swap(self, merit: Counts) -> bool:
        """Swap the two of most merit, if any has some. Whether it did."""
        one, other = np.unravel_index(np.argmax(merit), merit.shape)
        if merit[one, other] <= 0:
            return False
        self.gpu_of[[one, other]] = self.gpu_of[[other, one]]
        return True


LOOSENED = (1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
"""How far loads may lie above their bounds: first experts that follow each other get together, then
loads even.
"""
SWEEPS = 8
ENOUGH = 5e-4
"""A sweep that keeps so few more of the transitions is the last."""


def swap(record: ExpertRecord, gpus: int) -> Placement:
    """Less traffic than EPLB's and no layer worse balanced, by local search.

    Two searches start from EPLB's placement: one never leaves its bounds, the other loosens them
    and tightens them again, which finds groups that the first cannot reach. Both end within the
    bounds, and a sweep that stays within them never adds traffic, so that the better one is no
    worse than EPLB in either. Then each layer's highest load is lowered as far as that costs no
    traffic, which is all there is to do where no transitions were recorded.
    """
    reference = eplb(record, gpus)
    bounds = [bounds_of(load) for load in loads(record, reference)]
    near = _Search(record, reference)
    far = _Search(record, reference)
    near.until_settled(bounds)
    for loosened in LOOSENED:
        far.until_settled([one.loosened(loosened) for one in bounds])
    best = max(near, far, key=lambda search: kept(record, search.placement))
    best.even(bounds)
    return best.placement


class _Search:
    """A placement that is made better layer by layer, from `reference` on."""

    def __init__(self, record: ExpertRecord, reference: Placement) -> None:
        self._record = record
        self._reference = reference
        self._gpu_of = reference.gpu_of.copy()
        self._on = reference.on.copy()

    @property
    def placement(self) -> Placement:
        return Placement(self._reference.gpus, self._gpu_of)

    def until_settled(self, bounds: Sequence[Bounds]) -> None:
        """Sweep forth and back until a sweep changes little. Within `bounds` afterwards, if
        `reference` is.
        """
        forth = range(len(self._gpu_of))
        before = -np.inf
        for sweep in range(SWEEPS):
            for number in forth if sweep % 2 == 0 else reversed(forth):
                layer = self._layer(number)
                if not layer.level(bounds[number]):
                    layer.gpu_of = self._reference.gpu_of[number].copy()
                layer.gather(bounds[number])
                self._put(number, layer)
            now = kept(self._record, self.placement)
            if now - before <= ENOUGH * now:
                return
            before = now

    def even(self, bounds: Sequence[Bounds]) -> None:
        """Lower each layer's highest load where no transition is lost by it."""
        for number in range(len(self._gpu_of)):
            layer = self._layer(number)
            layer.even(bounds[number])
            self._put(number, layer)

    def _layer(self, number: int) -> Layer:
        pull = pull_of(self._record, self._on, number)
        return Layer(self._gpu_of[number].copy(), self._record.activations[number], pull)

    def _put(self, number: int, layer: Layer) -> None:
        self._gpu_of[number] = layer.gpu_of
        self._on[number] = np.eye(self._reference.gpus)[layer.gpu_of]


Algorithm = Callable[[ExpertRecord, int], Placement]

ALGORITHMS: Mapping[str, Algorithm] = {
    "swap": swap,
    "gimbal": gimbal,
    "eplb": eplb,
    "contiguous": contiguous,
}


def place(algorithm: str, record: ExpertRecord, gpus: int) -> Placement:
    """The placement on `gpus` GPUs that `algorithm` finds for `record`. Raises ConfigError."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"There is no placement algorithm {algorithm!r}.",
            remedy=f"Choose one of: {', '.join(ALGORITHMS)}.",
        )
    return ALGORITHMS[algorithm](record, gpus)
