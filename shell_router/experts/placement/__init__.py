"""On which GPU each expert of a mixture-of-experts model lives (Gimbal, section III.D)."""

from shell_router.experts.placement.algorithms import ALGORITHMS, place
from shell_router.experts.placement.records import (
    ExpertRecord,
    Measures,
    Placement,
    measures,
    record_of,
)

__all__ = ["ALGORITHMS", "ExpertRecord", "Measures", "Placement", "measures", "place", "record_of"]
