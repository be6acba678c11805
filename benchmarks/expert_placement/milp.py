"""The paper's program (equations 3 to 12), solved by CP-SAT: what the others are held against on
small cases.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from shell_router.experts.placement.records import (
    ExpertPlacement,
    ExpertRecord,
    compute_loads,
    count_kept,
    experts_per_gpu,
)


@dataclass(frozen=True)
class Weights:
    """`alpha` and `beta` weigh D and the cut (12); `one_partition` places all layers alike, as the
    paper writes it.
    """

    alpha: float = 1.0
    beta: float = 1.0
    one_partition: bool = False


LIMIT_S = 60.0


def milp(record: ExpertRecord, gpus: int, weights: Weights = Weights()) -> ExpertPlacement:
    """The placement of least `objective`. Hopeless beyond 16 experts: ValueError where it is not
    proven in 60 s.
    """
    program = _Program(record, gpus, weights)
    return ExpertPlacement(gpus, program.solved())


def objective(record: ExpertRecord, placement: ExpertPlacement, weights: Weights) -> float:
    """(12): `alpha` D + `beta` cut, D and the cut in activations and transitions."""
    load = compute_loads(record, placement)
    deviation = float(abs(load - load.mean(axis=1, keepdims=True)).max())
    cut = float(record.transitions.sum()) - count_kept(record, placement)
    return weights.alpha * deviation + weights.beta * cut


class _Program:
    def __init__(self, record: ExpertRecord, gpus: int, weights: Weights) -> None:
        self._model = cp_model.CpModel()
        self._record = record
        self._weights = weights
        self._gpus = range(gpus)
        rows = 1 if weights.one_partition else len(record.activations)
        self._x = [self._placed_layer() for _ in range(rows)]
        deviation = self._deviation()
        self._model.minimize(
            weights.alpha / gpus * deviation + weights.beta * sum(self._cut_terms())
        )  # (12)

    def solved(self) -> Any:
        """The experts' GPUs [layers, experts]."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = LIMIT_S
        solver.parameters.random_seed = 0
        if (status := solver.solve(self._model)) != cp_model.OPTIMAL:
            raise ValueError(
                f"no placement was proven best within {LIMIT_S:g} s: {solver.status_name(status)}"
            )
        found = np.array(
            [[[solver.value(one) for one in row] for row in layer] for layer in self._x]
        ).argmax(axis=2)
        return np.repeat(found, len(self._record.activations) // len(found), axis=0)

    def _placed_layer(self) -> list[list[Any]]:
        experts = self._record.experts
        x = [[self._model.new_bool_var("") for _ in self._gpus] for _ in range(experts)]
        for row in x:
            self._model.add_exactly_one(row)  # (3)
        for gpu in self._gpus:
            self._model.add(
                sum(row[gpu] for row in x) == experts_per_gpu(experts, len(self._gpus))
            )  # (4)
        return x

    def _layer(self, number: int) -> list[list[Any]]:
        return self._x[0] if self._weights.one_partition else self._x[number]

    def _deviation(self) -> Any:
        """g D: the ideal load is a whole number only g times."""
        activations = self._record.activations.astype(int)
        most = len(self._gpus) * int(activations.sum(axis=1).max())
        deviation = self._model.new_int_var(0, most, "g D")
        for number, row in enumerate(activations):
            total = int(row.sum())  # (5), g times (6)
            for gpu in self._gpus:
                load = sum(
                    int(count) * of[gpu] for count, of in zip(row, self._layer(number), strict=True)
                )  # (7)
                self._model.add(len(self._gpus) * load - total <= deviation)  # (8)
                self._model.add(total - len(self._gpus) * load <= deviation)  # (9)
        return deviation

    def _cut_terms(self) -> list[Any]:
        """The transitions of each pair of experts, times whether they are apart (11)."""
        if self._weights.one_partition:
            links = [
                (0, 0, self._record.transitions.sum(axis=0) * (1 - np.eye(self._record.experts)))
            ]  # (2)
        else:
            links = [(at, at + 1, counts) for at, counts in enumerate(self._record.transitions)]
        return [
            int(counts[one, other])
            * (1 - self._together(self._x[here][one], self._x[there][other]))
            for here, there, counts in links
            for one, other in np.argwhere(counts)
        ]

    def _together(self, one: list[Any], other: list[Any]) -> Any:
        """The sum over the GPUs of s, which is 1 where both experts are (10); its lower bound
        follows from (12).
        """
        same = [self._model.new_bool_var("") for _ in self._gpus]
        for both, first, second in zip(same, one, other, strict=True):
            self._model.add_implication(both, first)
            self._model.add_implication(both, second)
        return sum(same)
