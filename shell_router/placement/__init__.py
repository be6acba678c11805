"""On which GPU each expert of a mixture-of-experts model lives (Gimbal, section III.D)."""

from shell_router.placement.algorithms import ALGORITHMS, place
from shell_router.placement.measures import Measures, measures
from shell_router.placement.placement import Placement
from shell_router.placement.record import ExpertRecord, record_of
from shell_router.placement.settings import PlacementSettings

__all__ = ["ALGORITHMS", "ExpertRecord", "Measures", "Placement", "PlacementSettings", "measures", "place", "record_of"]
