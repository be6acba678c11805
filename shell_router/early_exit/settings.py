"""A cluster's settings of early exit, and the table of policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from shell_router.early_exit.cluster_gate import ClusterGate
from shell_router.early_exit.first_answer import FirstAnswerGate
from shell_router.early_exit.gate import Gate
from shell_router.early_exit.in_flight import InFlightGate
from shell_router.early_exit.quorum import QuorumGate
from shell_router.errors import require
from shell_router.files.types import Count, OneOf, Share, Switch


@dataclass(frozen=True, slots=True)
class ExitPolicy:
    """An early-exit policy: its gate, and what the gate needs.

    Attributes:
        new_gate: Makes the gate of one cluster of one run, from settings and the agents' ids.
        meaning: What it does, to follow its name in a sentence.
        judges: It judges outputs, so engines report log-probabilities. If not, a cluster without
            any output fails the run.
        has_threshold: It exits at a score, which can be calibrated.
        reads_tau: Its score depends on `tau`.
        embeds: It reads the embeddings of complete outputs.
        reads_streams: It reads outputs while they are written.
        names_sources: Its judgements name the agents that agree, as `skip_aggregation` needs.
        forwards: With `skip_aggregation`, an output that no reader may forward is not judged.
        takes_grace: `grace_s` passes between its decision and the exit.
    """

    new_gate: Callable[["EarlyExit", Sequence[str]], Gate]
    meaning: str
    judges: bool = True
    has_threshold: bool = True
    reads_tau: bool = False
    embeds: bool = False
    reads_streams: bool = False
    names_sources: bool = False
    forwards: bool = False
    takes_grace: bool = False


POLICIES: Mapping[str, ExitPolicy] = {
    "paper": ExitPolicy(
        lambda settings, agents: ClusterGate(
            tau=settings.tau, min_completed=settings.min_completed
        ),
        "exits with probability Q",
        has_threshold=False,
        reads_tau=True,
        embeds=True,
    ),
    "threshold": ExitPolicy(
        lambda settings, agents: ClusterGate(
            tau=settings.tau,
            min_completed=settings.min_completed,
            threshold=settings.threshold,
        ),
        "exits at Q >= threshold",
        reads_tau=True,
        embeds=True,
    ),
    "monotone": ExitPolicy(
        lambda settings, agents: ClusterGate(
            tau=None, min_completed=settings.min_completed, threshold=settings.threshold
        ),
        "exits when sqrt(confidence * similarity) reaches threshold",
        embeds=True,
    ),
    "in_flight": ExitPolicy(
        lambda settings, agents: InFlightGate(
            agents, quorum=settings.min_completed, threshold=settings.threshold
        ),
        "reads unfinished outputs too and exits when the leading answer's support reaches "
        "threshold",
        reads_streams=True,
        names_sources=True,
    ),
    "first_answer": ExitPolicy(
        lambda settings, agents: FirstAnswerGate(agents[0], settings.threshold),
        "exits when 1 - sqrt(1 - confidence) of the cluster's first agent reaches threshold",
        names_sources=True,
        forwards=True,
    ),
    "quorum": ExitPolicy(
        lambda settings, agents: QuorumGate(settings.min_completed),
        "exits grace_s after min_completed agents have ended",
        judges=False,
        has_threshold=False,
        takes_grace=True,
    ),
}
"""Every policy by its name in topologies. A new one is a class with `Gate`'s members, in a file of
its own, and an entry here.
"""


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """When a cluster's unfinished agents are cut off.

    `threshold` is compared with the policy's score. The paper's
    `min_completed` is 1, and its scope a layer. An agent that is skipped forwards the most
    confident complete output that it could have written.
    """

    policy: Annotated[
        str,
        "; ".join(f"'{name}' {policy.meaning}" for name, policy in POLICIES.items()) + ".",
        OneOf(POLICIES),
    ] = "paper"
    scope: Annotated[
        Literal["cluster", "layer"],
        "Which agents are judged together, without 'clusters': those with the same successors, or "
        "a whole layer.",
    ] = "cluster"
    tau: Annotated[
        float,
        Interval(gt=0, le=1),
        "With 'paper' and 'threshold': the preferred similarity of completed outputs.",
    ] = 0.7
    threshold: Annotated[Share, "Used by all policies but 'paper' and 'quorum'."] = 0.8
    max_changed_percent: Annotated[
        float | None,
        Interval(gt=0, lt=100),
        "How many answers in a hundred an exit may change: the threshold is then calibrated on "
        "complete runs, and replaces 'threshold'.",
    ] = None
    min_completed: Annotated[
        Count,
        "Outputs that must be complete before the first score (not with 'first_answer'); with "
        "'in_flight', that state the leading answer.",
    ] = 2
    skip_aggregation: Annotated[
        Switch,
        "With 'in_flight' and 'first_answer': on an exit, agents that read only the cluster are "
        "skipped and forward its answer.",
    ] = False
    ask_first: Annotated[
        Switch,
        "All other agents of the run start once the cluster's first one has ended.",
    ] = False
    grace_s: Annotated[
        float,
        Interval(ge=0, le=86_400),
        "With 'quorum': seconds that the others get once min_completed have ended.",
    ] = 0.0
    straggler_factor: Annotated[
        float,
        Interval(ge=0),
        "Also exit once min_completed have ended and all others have decoded this many times "
        "longer than an output of the cluster's predicted median length takes; 0: never.",
    ] = 0.0

    @property
    def needs(self) -> ExitPolicy:
        """The policy's entry in the table."""
        return POLICIES[self.policy]

    def new_gate(self, agents: Sequence[str]) -> Gate:
        """Make the gate for one cluster of one run."""
        return self.needs.new_gate(self, agents)

    def __post_init__(self) -> None:
        graced = " or ".join(name for name, entry in POLICIES.items() if entry.takes_grace)
        require(
            not self.grace_s or self.needs.takes_grace,
            f"grace_s goes with policy {graced}, not {self.policy!r}",
        )
        require(
            self.max_changed_percent is None or self.needs.has_threshold,
            f"max_changed_percent goes with a policy that has a threshold, not {self.policy!r}",
        )
        if not self.skip_aggregation:
            return
        require(
            self.scope != "layer",
            "skip_aggregation goes with scope cluster: a layer may have several readers",
        )
        naming = " or ".join(name for name, entry in POLICIES.items() if entry.names_sources)
        require(
            self.needs.names_sources,
            f"skip_aggregation goes with policy {naming}, which reads what outputs say, not "
            f"{self.policy!r}",
        )
