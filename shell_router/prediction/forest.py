"""A quantile forest's medians, from plain arrays (Meinshausen, 2006).

`quantile-forest` fits it (`fitting.py`); what it fitted is kept as arrays, so that serving it takes NumPy alone, and no
file of it can hold code.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shell_router.prediction.files import Arrays

Floats = NDArray[np.float32]
Places = NDArray[np.int32]
LEAF = -1


@dataclass(frozen=True, slots=True)
class Forest:
    """The nodes of all trees one behind the other: a row goes left where its `feature` is at most `threshold`.

    `left` of a leaf is LEAF, and `values[begins[node]:ends[node]]` are the targets that fell into it.
    """

    roots: Places
    left: Places
    right: Places
    feature: Places
    threshold: NDArray[np.float64]
    begins: Places
    ends: Places
    values: Floats

    def medians(self, rows: Floats) -> list[float]:
        """Per row [rows, features] the median of the targets in its leaves, all trees' together."""
        return [self._median(leaves) for leaves in self._leaves(rows)]

    def _leaves(self, rows: Floats) -> Places:
        """The leaf of each row in each tree, [rows, trees]."""
        nodes = np.tile(self.roots, (len(rows), 1))
        row = np.arange(len(rows))[:, None]
        while True:
            inner = self.left[nodes] != LEAF
            if not inner.any():
                return nodes
            goes_left = rows[row, self.feature[nodes]] <= self.threshold[nodes]
            below = np.where(goes_left, self.left[nodes], self.right[nodes])
            nodes = np.where(inner, below, nodes)

    def _median(self, leaves: Places) -> float:
        pieces = [self.values[self.begins[leaf] : self.ends[leaf]] for leaf in leaves]
        return float(np.median(np.concatenate(pieces)))

    def arrays(self, name: str) -> Arrays:
        """All arrays, their names beginning with `name`."""
        return {f"{name}.{field}": getattr(self, field) for field in self.__slots__}

    @classmethod
    def of_arrays(cls, name: str, arrays: Arrays) -> "Forest":
        """The forest that `arrays` gave under this name."""
        return cls(**{field: arrays[f"{name}.{field}"] for field in cls.__slots__})
