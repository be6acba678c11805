"""Layer by layer, each solved exactly for the layer before it."""

from math import ceil, floor
from typing import Any

import numpy as np

from shell_router.placement.baselines import eplb
from shell_router.placement.layer import Bounds, Layer, bounds_of, pull_of
from shell_router.placement.measures import loads
from shell_router.placement.placement import Gpus, Placement, experts_per_gpu
from shell_router.placement.record import ExpertRecord
from shell_router.placement.settings import PlacementSettings
from shell_router.placement.solver import cp_sat, solved


def layerwise(record: ExpertRecord, settings: PlacementSettings) -> Placement:
    """The first layer as EPLB places it, then each so that most transitions from the one before stay; needs OR-tools.

    Within the bounds of `swap` (`slack`), so that no layer is worse balanced than EPLB's. Each layer is proven optimal
    unless `limit_s` ends its solver first; the whole is not, as no layer looks at the next. Raises ConfigError.
    """
    cp = cp_sat()
    reference = eplb(record, settings)
    bounds = [bounds_of(load, settings.slack) for load in loads(record, reference)]
    gpu_of, on = reference.gpu_of.copy(), reference.on.copy()
    for number in range(1, len(gpu_of)):
        layer = Layer(gpu_of[number].copy(), record.activations[number], pull_of(record, on, number, after=False))
        layer.gather(bounds[number])  # where the solver starts
        gpu_of[number] = _exact(cp, layer, bounds[number], settings)
        on[number] = np.eye(settings.gpus)[gpu_of[number]]
    return Placement(settings.gpus, gpu_of)


def _exact(cp: Any, layer: Layer, bounds: Bounds, settings: PlacementSettings) -> Gpus:
    """The experts' GPUs [experts] with most pull, of those within `bounds`."""
    model, (experts, gpus) = cp.CpModel(), layer.pull.shape
    x = [[model.new_bool_var(f"x {expert} {gpu}") for gpu in range(gpus)] for expert in range(experts)]
    for row, gpu in zip(x, layer.gpu_of, strict=True):
        model.add_exactly_one(row)  # (3)
        for at, variable in enumerate(row):
            model.add_hint(variable, at == gpu)
    activations, pull = layer.activations.astype(int), layer.pull.astype(int)
    for gpu in range(gpus):
        column = [row[gpu] for row in x]
        model.add(sum(column) == experts_per_gpu(experts, gpus))  # (4)
        load = cp.LinearExpr.weighted_sum(column, activations)
        model.add_linear_constraint(load, ceil(bounds.low), floor(bounds.high))  # (8, 9)
    flat = [variable for row in x for variable in row]
    model.maximize(cp.LinearExpr.weighted_sum(flat, pull.ravel()))
    solver = solved(cp, model, settings.limit_s)
    return np.asarray(np.array([[solver.value(variable) for variable in row] for row in x]).argmax(axis=1))
