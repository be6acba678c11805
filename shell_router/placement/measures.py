"""How good a placement is: its balance (equations 5 to 9) and what crosses from GPU to GPU (11)."""

from dataclasses import dataclass

import numpy as np

from shell_router.placement.placement import Placement
from shell_router.placement.record import Counts, ExpertRecord


@dataclass(frozen=True, slots=True)
class Measures:
    """Of a placement on a record.

    `balance` is the load of a layer's fullest GPU over the mean of its GPUs, a mean over the layers: 1 is even, and the
    experts of a step take so many times as long as they need to. `worst_balance` is the highest of a layer.
    `deviation` is the paper's D (8, 9) as a share of the ideal load L_i: how far any GPU is above or below it.
    `traffic` is the share of the transitions that lead to another GPU (11), 0 where none were recorded.
    """

    balance: float
    worst_balance: float
    deviation: float
    traffic: float


def loads(record: ExpertRecord, placement: Placement) -> Counts:
    """L [layers, gpus]: the activations of each GPU's experts (7)."""
    return np.asarray((record.activations[:, None] @ placement.on)[:, 0])


def kept(record: ExpertRecord, placement: Placement) -> float:
    """The transitions that stay on their GPU.

    Per layer: from expert j of a layer to k of the next, each where it is placed in its own layer. Where all layers
    are placed alike this is what the cut of (11) leaves, with W made symmetric.
    """
    on = placement.on
    return float(((record.transitions @ on[1:]) * on[:-1]).sum())


def measures(record: ExpertRecord, placement: Placement) -> Measures:
    """How good `placement` is, if tokens are routed as in `record`."""
    load = loads(record, placement)
    ideal = load.mean(axis=1, keepdims=True)
    balance = load.max(axis=1) / ideal[:, 0]
    total = record.transitions.sum()
    return Measures(
        balance=float(balance.mean()),
        worst_balance=float(balance.max()),
        deviation=float((abs(load - ideal) / ideal).max()),
        traffic=float(1 - kept(record, placement) / total) if total else 0.0,
    )
