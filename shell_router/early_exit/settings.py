"""What a topology may say about a cluster's early exit."""

from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["stochastic", "threshold", "in_flight"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """When a cluster's unfinished agents are cut off.

    `stochastic` exits with probability Q (Algorithm 1, line 14); `threshold` exits when Q >= `threshold`; `in_flight`
    reads unfinished outputs too, and exits when the leading answer's support (`InFlightGate`) reaches `threshold`.
    `tau` is the preferred similarity. The gate is silent until `min_completed` outputs are there (the paper's
    is 1), or, with `in_flight`, so many state the leading answer and one of them is there. `similarity` chooses the
    correlation matrices' entries: `full` is the paper's; `off_diagonal` leaves out the diagonal of ones, which makes
    unrelated long texts look alike. With `pass_on`, which needs `in_flight`, an agent that reads just this cluster
    writes nothing where the leading answer's support reaches `threshold`: it passes the surest complete output on.
    """

    policy: Policy = "stochastic"
    tau: float = 0.7
    threshold: float = 0.8
    min_completed: int = 2
    similarity: Literal["full", "off_diagonal"] = "full"
    pass_on: bool = False

    @property
    def embeds(self) -> bool:
        """Whether outputs have to be embedded."""
        return self.policy != "in_flight"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.similarity not in ("full", "off_diagonal"):
            raise ValueError(f"similarity must be 'full' or 'off_diagonal', not {self.similarity!r}")
        if not 0 < self.tau <= 1:
            raise ValueError(f"tau must be above 0 and at most 1, not {self.tau}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be between 0 and 1, not {self.threshold}")
        if self.min_completed < 1:
            raise ValueError(f"min_completed must be at least 1, not {self.min_completed}")
        if self.pass_on and self.policy != "in_flight":
            raise ValueError(f"pass_on goes with policy in_flight, which reads what outputs say, not {self.policy!r}")
