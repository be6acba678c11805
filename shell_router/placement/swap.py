"""Swaps of two experts, layer by layer and to and fro, under EPLB's own balance: the default."""

from collections.abc import Iterable, Sequence

import numpy as np

from shell_router.placement.baselines import eplb
from shell_router.placement.layer import Bounds, Layer, bounds_of, pull_of
from shell_router.placement.measures import kept, loads
from shell_router.placement.placement import Placement
from shell_router.placement.record import ExpertRecord
from shell_router.placement.settings import PlacementSettings

LOOSENED = (1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
"""How far loads may lie above their bounds: first experts that follow each other get together, then loads even."""
SWEEPS = 8
ENOUGH = 5e-4
"""A sweep that keeps so few more of the transitions is the last."""


def swap(record: ExpertRecord, settings: PlacementSettings) -> Placement:
    """Less traffic than EPLB's and no layer worse balanced, by local search; reads `gpus` and `slack`.

    Two searches start from EPLB's placement: one never leaves its bounds, the other loosens them and tightens them
    again, which finds groups that the first cannot reach. Both end within the bounds, and a sweep that stays within
    them never adds traffic, so that the better one is no worse than EPLB in either. Then each layer's highest load is
    lowered as far as that costs no traffic, which is all there is to do where no transitions were recorded.
    """
    reference = eplb(record, settings)
    bounds = [bounds_of(load, settings.slack) for load in loads(record, reference)]
    near, far = _Search(record, reference), _Search(record, reference)
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
        """Sweep forth and back until a sweep changes little. Within `bounds` afterwards, if `reference` is."""
        forth = range(len(self._gpu_of))
        before = -np.inf
        for sweep in range(SWEEPS):
            self._sweep(forth if sweep % 2 == 0 else reversed(forth), bounds)
            now = kept(self._record, self.placement)
            if now - before <= ENOUGH * now:
                return
            before = now

    def _sweep(self, order: Iterable[int], bounds: Sequence[Bounds]) -> None:
        for number in order:
            layer = self._layer(number)
            if not layer.level(bounds[number]):
                layer.gpu_of = self._reference.gpu_of[number].copy()
            layer.gather(bounds[number])
            self._put(number, layer)

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
