"""The placement of a mixture-of-experts model's experts on GPUs (Gimbal, section III.D)."""

from shell_router.experts.placement.algorithms import ALGORITHMS, place
from shell_router.experts.placement.records import (
    ExpertRecord,
    Measures,
    Placement,
    build_record,
    measure_placement,
)

__all__ = [
    "ALGORITHMS",
    "ExpertRecord",
    "Measures",
    "Placement",
    "build_record",
    "measure_placement",
    "place",
]
