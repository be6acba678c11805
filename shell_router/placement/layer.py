"""One layer's experts, moved by swaps of two, while the layers around it stay as they are."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shell_router.placement.placement import Gpus
from shell_router.placement.record import Counts, ExpertRecord

ROUNDING = 1e-6
"""Loads are whole numbers; the ideal load is not."""


def pull_of(record: ExpertRecord, on: Counts, layer: int, *, after: bool = True) -> Counts:
    """[experts, gpus]: the transitions that stay on a GPU if the expert is there, with the layers around it as in `on`.

    A layer's part of the cut (11) is linear in its own x, since experts of one layer never follow each other. Without
    `after` only those from the previous layer count.
    """
    pull = np.zeros(on.shape[1:])
    if layer > 0:
        pull += record.transitions[layer - 1].T @ on[layer - 1]
    if after and layer < len(on) - 1:
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


def bounds_of(load: Counts, slack: float) -> Bounds:
    """What a layer with EPLB's `load` [gpus] allows: the load of its fullest GPU, and D (8, 9) around the ideal.

    Where `slack` allows more around the ideal load, that. Within them a layer is worse in neither than by EPLB.
    """
    ideal = load.mean()
    deviation = abs(load - ideal).max()
    low, high = min(ideal - deviation, (1 - slack) * ideal), max(load.max(), (1 + slack) * ideal)
    return Bounds(low - ROUNDING, high + ROUNDING)


@dataclass(slots=True, eq=False)
class Layer:
    """A layer's experts on their GPUs: `gpu_of`, `activations` [experts], and their `pull` [experts, gpus].

    The methods change `gpu_of`. Each swaps two experts as long as that is better, so that numbers per GPU stay equal,
    and ends, since no placement comes twice.
    """

    gpu_of: Gpus
    activations: Counts
    pull: Counts

    @property
    def load(self) -> Counts:
        """[gpus]."""
        return np.asarray(np.bincount(self.gpu_of, self.activations, minlength=self.pull.shape[1]), dtype=np.float64)

    def level(self, bounds: Bounds) -> bool:
        """Bring every GPU's load within `bounds`, first by the swap that loses least for it. Whether it could."""
        while (outside := bounds.outside(self.load)).any():
            now = outside[self.gpu_of]
            relief = now[:, None] + now - bounds.outside(self._after()).sum(axis=0)
            loss = -self._gain()
            merit = relief / (1 + loss - loss.min())
            if not self._swap(np.where(self._apart(), merit, 0.0)):
                return False
        return True

    def gather(self, bounds: Bounds) -> None:
        """Keep more transitions on their GPUs, all loads within `bounds` as they were: the best swap first."""
        while self._swap(np.where(bounds.outside(self._after()).any(axis=0), 0.0, self._gain())):
            pass

    def even(self, bounds: Bounds) -> None:
        """Lower the highest load where that loses no transition, within `bounds`: what lowers it most first."""
        while True:
            load, after = self.load, self._after()
            fullest = load[self.gpu_of][:, None] == load.max()
            free = (self._gain() >= 0) & ~bounds.outside(after).any(axis=0)
            if not self._swap(np.where(fullest & self._apart() & free, load.max() - after.max(axis=0), 0.0)):
                return

    def _gain(self) -> Counts:
        """[experts, experts]: how many more transitions stay on their GPUs after a swap of the two."""
        there = self.pull[:, self.gpu_of]
        now = there.diagonal()
        return np.asarray(there + there.T - now - now[:, None])

    def _after(self) -> Counts:
        """[2, experts, experts]: the loads of the first's and of the second's GPU after a swap of the two."""
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
