"""One layer's experts, moved by swaps of two, while the layers around it stay as they are."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shell_router.placement.placement import Gpus
from shell_router.placement.record import Counts, ExpertRecord


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

    def level(self, bound: float) -> bool:
        """Bring every GPU's load to `bound`, first by the swap that loses least per load above it. Whether it could."""
        while (excess := (self.load - bound).clip(0)).any():
            above = excess[self.gpu_of]
            relief = above[:, None] + above - (self._after() - bound).clip(0).sum(axis=0)
            loss = -self._gain()
            merit = relief / (1 + loss - loss.min())
            if not self._swap(np.where(self._apart(), merit, 0.0)):
                return False
        return True

    def gather(self, bound: float) -> None:
        """Keep more transitions on their GPUs, with no load above `bound`: the best swap first."""
        while self._swap(np.where(self._after().max(axis=0) <= bound, self._gain(), 0.0)):
            pass

    def even(self) -> None:
        """Lower the highest load where that loses no transition: the swap that lowers it most first."""
        while True:
            load = self.load
            lower = load.max() - self._after().max(axis=0)
            fullest = load[self.gpu_of] == load.max()
            if not self._swap(np.where(fullest[:, None] & self._apart() & (self._gain() >= 0), lower, 0.0)):
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
