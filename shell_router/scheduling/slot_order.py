"""The order in which a successor's slots are filled (Faster-MoA fills as declared; expected finish is ours, B1)."""

from collections.abc import Mapping, Sequence
from typing import Literal

SlotOrder = Literal["declared", "expected_finish"]


def order_slots(precursors: Sequence[str], order: SlotOrder, expected_finish_s: Mapping[str, float]) -> tuple[str, ...]:
    """Precursors in the order their outputs stand in the prompt.

    With `expected_finish` the one expected to end first comes first, so that a slow precursor does not hold back
    the slots behind it; one without an estimate keeps its declared place among the last.
    """
    if order == "declared":
        return tuple(precursors)
    return tuple(sorted(precursors, key=lambda agent: expected_finish_s.get(agent, float("inf"))))
