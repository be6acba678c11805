"""The placement of a mixture-of-experts model's experts on GPUs (Gimbal, section III.D)."""

from shell_router.experts.placement.algorithms import ALGORITHMS, place
from shell_router.experts.placement.records import (
    ExpertPlacement,
    ExpertRecord,
    Measures,
    build_record,
    measure_placement,
)

__all__ = [
    "ALGORITHMS",
    "ExpertPlacement",
    "ExpertRecord",
    "Measures",
    "build_record",
    "measure_placement",
    "place",
]
