"""How well an order is told (Chimera, table 3)."""

from collections.abc import Sequence

import numpy as np


def kendall_distance(told: Sequence[float], true: Sequence[float]) -> float:
    """Share of pairs, of those that differ in truth, whose order `told` has wrong; a tie in `told` counts half.

    0 is the right order, 1 the opposite, 0.5 chance. NaN where no two differ.
    """
    guess, truth = np.asarray(told, dtype=float), np.asarray(true, dtype=float)
    wrong = pairs = 0.0
    for place in range(len(truth) - 1):
        real = np.sign(truth[place + 1 :] - truth[place])
        seen = np.sign(guess[place + 1 :] - guess[place])
        counted = real != 0
        pairs += counted.sum()
        wrong += (seen[counted] == -real[counted]).sum() + 0.5 * (seen[counted] == 0).sum()
    return float(wrong / pairs) if pairs else float("nan")
