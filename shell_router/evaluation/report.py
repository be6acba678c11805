"""The whole report as one object for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shell_router.core.intervals import METHOD_DIFFERENCE, METHOD_SHARE, Interval
from shell_router.evaluation.rows import Row
from shell_router.evaluation.settings import Served, Setting

SCRIPTED = "scripted"


@dataclass(frozen=True, slots=True)
class Report:
    """What was asked, on what, and what came out.

    `simulated` is None where the router does not tell what serves its models. `asked` answers of `wanted` are there:
    fewer mean that the evaluation was interrupted. `by` has the accuracy per value of the data's key `by_key`, and
    setting.
    """

    data: str
    engine: str
    simulated: bool | None
    settings: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    concurrency: int
    sampling: Mapping[str, Any]
    asked: int
    wanted: int
    rows: Sequence[Row]
    by_key: str | None
    by: Mapping[str, Mapping[str, Interval]]

    @property
    def partial(self) -> bool:
        """Whether something that was wanted was not asked."""
        return self.asked < self.wanted

    @property
    def title(self) -> str:
        """What was evaluated, on what, and whether it is whole."""
        truth = {True: "simulated", False: "real engines", None: "real or simulated"}[self.simulated]
        partial = f"\nPARTIAL: interrupted after {self.asked} of {self.wanted} answers" if self.partial else ""
        return f"Evaluation of {self.data} ({truth})\n{self.engine}{partial}"

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`; rows and intervals as objects."""
        methods = {"accuracy": METHOD_SHARE, "difference": METHOD_DIFFERENCE}
        return {"title": self.title, "partial": self.partial, **asdict(self), "methods": methods}


def engines_of(settings: Sequence[Setting], served: Sequence[Served]) -> tuple[str, bool | None]:
    """What serves the models, in words, and whether it only simulates; topologies may use any of the models."""
    alone = {name for one in settings for name in one.members if one.kind != "topology"}
    every = any(one.kind in ("topology", "auto") for one in settings)
    models = [one for one in served if one.kind == "model" and (every or one.name in alone)]
    if not models or not all(one.engine for one in models):
        return "engines unknown: the router does not name them", None
    words = list(dict.fromkeys(one.engine for one in models))
    return "; ".join(words), any(word.startswith(SCRIPTED) for word in words)
