"""Every placement algorithm, by the name that `--algorithm` takes."""

from collections.abc import Callable, Mapping

from shell_router.errors import ConfigError
from shell_router.placement.baselines import contiguous, eplb
from shell_router.placement.gimbal import gimbal
from shell_router.placement.layerwise import layerwise
from shell_router.placement.milp import milp
from shell_router.placement.placement import Placement
from shell_router.placement.record import ExpertRecord
from shell_router.placement.settings import PlacementSettings
from shell_router.placement.swap import swap

Algorithm = Callable[[ExpertRecord, PlacementSettings], Placement]

ALGORITHMS: Mapping[str, Algorithm] = {
    "swap": swap,
    "layerwise": layerwise,
    "gimbal": gimbal,
    "milp": milp,
    "eplb": eplb,
    "contiguous": contiguous,
}
ONE_PARTITION = ("gimbal", "milp")
"""Those that can place all layers alike."""


def place(algorithm: str, record: ExpertRecord, settings: PlacementSettings) -> Placement:
    """The placement that `algorithm` finds for `record`. Raises ConfigError."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"There is no placement algorithm {algorithm!r}.", remedy=f"Choose one of: {', '.join(ALGORITHMS)}."
        )
    if settings.one_partition and algorithm not in ONE_PARTITION:
        raise ConfigError(
            f"{algorithm} places each layer on its own.",
            remedy=f"For one partition of all layers choose one of: {', '.join(ONE_PARTITION)}.",
        )
    return ALGORITHMS[algorithm](record, settings)
