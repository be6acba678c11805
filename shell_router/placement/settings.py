"""What the placement algorithms take beside a record."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """For `gpus` GPUs. Each algorithm's docstring says what it reads.

    `slack` is how far above the mean the fullest GPU of a layer may be where EPLB's is nearer: 0.05 for 5 %. With 0
    no layer is worse balanced than by EPLB. `anchor_gpu` takes experts of strong affinity, those of the
    `affinity_pairs` strongest pairs per layer. `one_partition` places all layers alike, as the paper's program does.
    `alpha` and `beta` weigh D and the cut (12). `limit_s` bounds each run of a solver.
    """

    gpus: int
    slack: float = 0.0
    anchor_gpu: int = 0
    affinity_pairs: int = 8
    one_partition: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    limit_s: float = 60.0

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus must be at least 1, not {self.gpus}")
        if not 0 <= self.slack < inf:
            raise ValueError(f"slack must be a number from 0 on, not {self.slack}")
        if not 0 <= self.anchor_gpu < self.gpus:
            raise ValueError(f"anchor_gpu must be one of GPUs 0 to {self.gpus - 1}, not {self.anchor_gpu}")
        if self.affinity_pairs < 0:
            raise ValueError(f"affinity_pairs must be at least 0, not {self.affinity_pairs}")
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be a number from 0 on, not {getattr(self, name)}")
        if not 0 < self.limit_s < inf:
            raise ValueError(f"limit_s must be a positive number, not {self.limit_s}")
