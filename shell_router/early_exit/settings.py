"""What a topology may say about a cluster's early exit, and the policies it may name."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shell_router.early_exit.algorithm1 import ClusterGate, Features, Judgement
from shell_router.early_exit.in_flight import InFlightGate


class Gate(Protocol):
    """Judges one cluster of one run. A new policy is a class with these members and an entry in POLICIES."""

    embeds: bool
    """Whether it judges embeddings of complete outputs; if not, it also reads what is written, as it is written."""

    def wrote(self, agent: str, text: str, confidence: float) -> None:
        """The agent wrote more; `confidence` is that of all it has written. Not called for gates that embed."""
        ...

    def completed(self, agent: str, confidence: float, output: Features | None) -> None:
        """The agent has ended; `output` is its embedded output, for gates that embed. Called on a worker thread then.

        ValueError if it cannot be judged.
        """
        ...

    def judge(self, running: Collection[str], draw: Callable[[], float]) -> Judgement | None:
        """Whether the agents that still run are cut off; None if too little has completed."""
        ...


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """When a cluster's unfinished agents are cut off.

    `stochastic` exits with probability Q (Algorithm 1, line 14); `threshold` exits when Q >= `threshold`; `in_flight`
    reads unfinished outputs too, and exits when the leading answer's support (`InFlightGate`) reaches `threshold`;
    `quorum` reads no output, and exits `grace_s` after `min_completed` agents have ended.
    `tau` is the preferred similarity. The gate is silent until `min_completed` outputs are there (the paper's
    is 1), or, with `in_flight`, that many state the leading answer and one of them is there. P counts each output as
    similar to itself, as the paper's does, unless `self_similarity` is off. `scope` says which agents are judged
    together: those with the same successors, or all of a layer, as in the paper. With `skip_aggregation`, which needs
    `in_flight`, an agent that reads just this cluster is skipped where the leading answer's support reaches
    `threshold`: its output is the surest complete one of the cluster that it could have written.
    """

    policy: str = "stochastic"
    scope: Literal["cluster", "layer"] = "cluster"
    tau: float = 0.7
    threshold: float = 0.8
    min_completed: int = 2
    self_similarity: bool = True
    skip_aggregation: bool = False
    grace_s: float = 0.0

    @property
    def judges(self) -> bool:
        """Whether outputs are judged, by a gate."""
        return POLICIES[self.policy].gate is not None

    @property
    def embeds(self) -> bool:
        """Whether outputs have to be embedded."""
        return POLICIES[self.policy].embeds

    def gate(self, members: Sequence[str]) -> Gate:
        """A new gate for one cluster of one run, of a policy that judges."""
        gate = POLICIES[self.policy].gate
        assert gate is not None, f"{self.policy} judges nothing"
        return gate(self, members)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.scope not in ("cluster", "layer"):
            raise ValueError(f"scope must be 'cluster' or 'layer', not {self.scope!r}")
        if self.skip_aggregation and self.scope == "layer":
            raise ValueError(
                "skip_aggregation goes with scope cluster: no agent reads just a layer of several clusters"
            )
        if not 0 < self.tau <= 1:
            raise ValueError(f"tau must be above 0 and at most 1, not {self.tau}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be between 0 and 1, not {self.threshold}")
        if self.min_completed < 1:
            raise ValueError(f"min_completed must be at least 1, not {self.min_completed}")
        if self.grace_s and self.policy != "quorum":
            raise ValueError(f"grace_s goes with policy quorum, not {self.policy!r}")
        if self.skip_aggregation and self.policy != "in_flight":
            raise ValueError(
                f"skip_aggregation goes with policy in_flight, which reads what outputs say, not {self.policy!r}"
            )


@dataclass(frozen=True, slots=True)
class Policy:
    """How a policy's gate is made, None where outputs are only counted; whether they have to be embedded for it."""

    embeds: bool
    gate: Callable[[EarlyExit, Sequence[str]], Gate] | None


def _embedding(settings: EarlyExit, members: Sequence[str]) -> Gate:
    return ClusterGate(
        tau=settings.tau,
        min_completed=settings.min_completed,
        self_similarity=settings.self_similarity,
        threshold=settings.threshold if settings.policy == "threshold" else None,
    )


def _in_flight(settings: EarlyExit, members: Sequence[str]) -> Gate:
    return InFlightGate(members, quorum=settings.min_completed, threshold=settings.threshold)


POLICIES: Mapping[str, Policy] = {
    "stochastic": Policy(embeds=True, gate=_embedding),
    "threshold": Policy(embeds=True, gate=_embedding),
    "in_flight": Policy(embeds=False, gate=_in_flight),
    "quorum": Policy(embeds=False, gate=None),
}
