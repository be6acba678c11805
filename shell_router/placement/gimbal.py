"""Gimbal's Algorithm 3: experts of strong affinity on one GPU, the others where there is least load."""

import numpy as np

from shell_router.placement.baselines import packed
from shell_router.placement.placement import Gpus, Placement, experts_per_gpu
from shell_router.placement.record import Counts, ExpertRecord
from shell_router.placement.settings import PlacementSettings


def gimbal(record: ExpertRecord, settings: PlacementSettings) -> Placement:
    """Algorithm 3, with `anchor_gpu` for its k. M is made of the strongest pairs, `affinity_pairs` of them per layer.

    A pair of which an expert finds no room on the anchor is left out of M, as section III.D asks. Line 4 orders the
    remaining experts by A_ij, so each layer is placed on its own, and M holds a pair for its two layers only. With
    `one_partition` M comes from W (2), and experts are ordered by the activations of all layers: the other reading.
    """
    per_gpu = experts_per_gpu(record.experts, settings.gpus)
    if settings.one_partition:
        activations, links = record.activations.sum(axis=0, keepdims=True), record.affinity[None]
        row = _placed(activations, links, 0, settings, per_gpu)
        return Placement(settings.gpus, np.repeat(row, len(record.activations), axis=0))
    return Placement(settings.gpus, _placed(record.activations, record.transitions, 1, settings, per_gpu))


def _placed(activations: Counts, links: Counts, step: int, settings: PlacementSettings, per_gpu: int) -> Gpus:
    """The GPUs [layers, experts]; `links[i]` lead from layer i to layer i + `step`."""
    anchored = np.zeros(activations.shape, dtype=bool)
    for layer, one, other in _strongest(links, settings.affinity_pairs * len(links), apart=step == 0):
        wanted = {(layer, one), (layer + step, other)}
        new = {expert for expert in wanted if not anchored[expert]}
        if all(anchored[of].sum() + sum(layer_ == of for layer_, _ in new) <= per_gpu for of in (layer, layer + step)):
            for expert in new:
                anchored[expert] = True
    fixed = np.where(anchored, settings.anchor_gpu, -1)
    rows = zip(activations, fixed, strict=True)
    return np.array([packed(row, settings.gpus, per_gpu, placed) for row, placed in rows])


def _strongest(links: Counts, number: int, *, apart: bool) -> list[tuple[int, int, int]]:
    """The `number` pairs with most transitions, as (layer, expert, expert of the next), the strongest first."""
    strength = links.copy()
    if apart:  # an expert is always with itself
        np.einsum("ijj->ij", strength)[...] = 0
    order = np.argsort(-strength, axis=None, kind="stable")[:number]
    order = order[strength.flat[order] > 0]
    return list(zip(*(map(int, axis) for axis in np.unravel_index(order, strength.shape)), strict=True))
