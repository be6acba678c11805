"""What a topology may say about a cluster's early exit, and the policies it may name."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from shell_router.early_exit.algorithm1 import ClusterGate, Features, Judgement
from shell_router.early_exit.in_flight import InFlightGate


class Gate(Protocol):
    """Judges one cluster of one run. A new policy is a class with these members, and an entry in
    POLICIES."""

    embeds: bool
    """Whether it judges embeddings of complete outputs; if not, it also reads what is written, as
    it is written.
    """

    def wrote(self, agent: str, text: str, confidence: float) -> None:
        """The agent wrote more; `confidence` is that of all it has written. Not called for gates
        that embed.
        """
        ...

    def completed(self, agent: str, confidence: float, output: Features | None) -> None:
        """The agent has ended; `output` is its embedded output, for gates that embed. Called on a
        worker thread then.

        ValueError if it cannot be judged.
        """
        ...

    def judge(self, running: Collection[str], draw: Callable[[], float]) -> Judgement | None:
        """Whether the agents that still run are cut off; None if too little has completed."""
        ...


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """When a cluster's unfinished agents are cut off.

    `stochastic` exits with probability Q (Algorithm 1, line 14); `threshold` exits when Q >=
    `threshold`; `in_flight` reads unfinished outputs too, and exits when the leading answer's
    support (`InFlightGate`) reaches `threshold`; `quorum` reads no output, and exits `grace_s`
    after `min_completed` agents have ended. `tau` is the preferred similarity. The gate is silent
    until `min_completed` outputs are there (the paper's is 1), or, with `in_flight`, that many
    state the leading answer and one of them is there. P counts each output as similar to itself, as
    the paper's does, unless `self_similarity` is off. `scope` says which agents are judged
    together: those with the same successors, or all of a layer, as in the paper. With
    `skip_aggregation`, which needs `in_flight`, an agent that reads just this cluster is skipped
    where the leading answer's support reaches
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

    def gate(self, members: Sequence[str]) -> Gate | None:
        """A new gate for one cluster of one run; None where outputs are only counted."""
        gate = POLICIES[self.policy].gate
        if gate is None:
            return None
        return gate(self, members)

    def __post_init__(self) -> None:
        skips = self.skip_aggregation
        policy = self.policy
        checks = (
            (policy in POLICIES, f"policy must be one of {', '.join(POLICIES)}, not {policy!r}"),
            (
                self.scope in ("cluster", "layer"),
                f"scope must be 'cluster' or 'layer', not {self.scope!r}",
            ),
            (0 < self.tau <= 1, f"tau must be above 0 and at most 1, not {self.tau}"),
            (0 <= self.threshold <= 1, f"threshold must be between 0 and 1, not {self.threshold}"),
            (
                self.min_completed >= 1,
                f"min_completed must be at least 1, not {self.min_completed}",
            ),
            (
                not self.grace_s or policy == "quorum",
                f"grace_s goes with policy quorum, not {policy!r}",
            ),
            (
                not skips or self.scope != "layer",
                (
                    "skip_aggregation goes with scope cluster: no agent reads just a layer of "
                    "several clusters"
                ),
            ),
            (
                not skips or policy == "in_flight",
                (
                    "skip_aggregation goes with policy in_flight, which reads what outputs say, "
                    "not "
                    f"{policy!r}"
                ),
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)


class Policy(NamedTuple):
    """Whether outputs have to be embedded for it, and how its gate is made; None where outputs are
    only counted.
    """

    embeds: bool
    gate: Callable[[EarlyExit, Sequence[str]], Gate] | None


def _algorithm1(settings: EarlyExit, members: Sequence[str]) -> Gate:
    return ClusterGate(
        tau=settings.tau,
        min_completed=settings.min_completed,
        self_similarity=settings.self_similarity,
        threshold=settings.threshold if settings.policy == "threshold" else None,
    )


def _in_flight(settings: EarlyExit, members: Sequence[str]) -> Gate:
    return InFlightGate(members, quorum=settings.min_completed, threshold=settings.threshold)


POLICIES: Mapping[str, Policy] = {
    "stochastic": Policy(embeds=True, gate=_algorithm1),
    "threshold": Policy(embeds=True, gate=_algorithm1),
    "in_flight": Policy(embeds=False, gate=_in_flight),
    "quorum": Policy(embeds=False, gate=None),
}
