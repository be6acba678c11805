"""Chooses a topology's early exit: the fastest one whose loss of accuracy stays within a bound.

Every early exit that is tried makes a topology of its own; all are asked the same questions with
the same seeds as the topology without early exit, so that what differs between them is the exits'
doing.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from shell_router.core.exact_json import NewValues, Values
from shell_router.core.statistics import Interval
from shell_router.early_exit.settings import POLICIES, EarlyExit
from shell_router.errors import ConfigError, ShellRouterError, require
from shell_router.files.read import check
from shell_router.lab.evaluation.records import EvaluationOptions
from shell_router.lab.evaluation.report import Row
from shell_router.lab.evaluation.run import run_evaluation
from shell_router.topology import load_topology

Settings = Values
"""Keys of an `early_exit` block."""
OFF = (False, "off")


@dataclass(frozen=True, slots=True)
class Tried:
    """The values whose combinations are tried. Raises ConfigError for an impossible early exit."""

    thresholds: Sequence[float]
    policies: Sequence[str] = ("in_flight",)
    scopes: Sequence[str] = ("cluster",)
    taus: Sequence[float] = (0.7,)

    def __post_init__(self) -> None:
        for name in ("thresholds", "policies", "scopes", "taus"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"--{name} must name at least one value, and each once.")
        for policy, scope, tau, threshold in product(
            self.policies, self.scopes, self.taus, self.thresholds
        ):
            keys = {"policy": policy, "scope": scope, "tau": tau, "threshold": threshold}
            tried, problems = check(EarlyExit, keys)
            for problem in problems:
                raise ConfigError(
                    f"This early exit cannot be tried: {problem.message}", remedy=problem.remedy
                )
            require(tried.needs.has_threshold, f"policy {policy} has no threshold", "Leave it out.")

    def settings(self) -> list[Settings]:
        """Without the keys that a policy does not read."""
        candidates: list[Settings] = []
        for policy, scope in product(self.policies, self.scopes):
            taus: Sequence[Settings] = (
                [{"tau": tau} for tau in self.taus] if POLICIES[policy].reads_tau else [{}]
            )
            for tau, threshold in product(taus, self.thresholds):
                candidates.append({"policy": policy, "scope": scope, **tau, "threshold": threshold})
        return candidates


Variants = Mapping[str, Settings | None]
"""By the names of topologies what is tried: first none, then early exits."""


@dataclass(frozen=True, slots=True)
class CalibratedExit:
    """An early exit, its loss of accuracy in points, and its median latency, relative to none."""

    settings: Settings
    loss: Interval
    latency: float


def choose(rows: Sequence[tuple[Settings, Row]], bound: float) -> CalibratedExit | None:
    """Return the fastest early exit that loses at most `bound` points; None if there is none.

    From the cautious end down, the first threshold that loses more ends the search among those that
    differ in it alone: a lower one that loses less by luck is not believed.
    """
    within = list[CalibratedExit]()
    ended = list[Settings]()
    for settings, row in sorted(rows, key=lambda pair: -pair[0]["threshold"]):
        others = {key: value for key, value in settings.items() if key != "threshold"}
        loss = compute_loss(row)
        if others in ended or loss.value > bound:
            ended.append(others)
            continue
        within.append(
            CalibratedExit(
                settings, loss, math.inf if row.latency_ratio is None else row.latency_ratio
            )
        )
    return min(within, key=lambda calibrated: calibrated.latency, default=None)


def compute_loss(row: Row) -> Interval:
    """Return a setting's loss against the baseline, in points of accuracy; below 0 for a gain."""
    assert row.difference is not None
    lost = (
        0.0 - 100 * end for end in (row.difference.value, row.difference.high, row.difference.low)
    )  # never -0.0
    return Interval(*lost)


def replace_exit(document: Values, name: str, settings: Settings | None) -> NewValues:
    """Return a topology with another early exit wherever it has one, or for all clusters.

    Other keys of its blocks stay if they go together with `settings`. None turns early exit off.
    """
    changed: NewValues = deepcopy(dict(document)) | {"name": name}
    holders: list[NewValues] = [changed, *changed.get("clusters", {}).values()]
    if settings is None:
        for holder in holders:
            holder["early_exit"] = False
        return changed
    exiting = [holder for holder in holders if holder.get("early_exit", "off") not in OFF]
    for holder in exiting or [changed]:
        own = holder.get("early_exit")
        block = {**(own if isinstance(own, dict) else {}), **settings}
        block.pop("max_changed_percent", None)  # it would replace the threshold
        if not POLICIES[settings["policy"]].names_sources or settings["scope"] == "layer":
            block.pop("skip_aggregation", None)
        holder["early_exit"] = block
    return changed


async def run_calibration(
    topology: Path, tried: Tried, bound: float, options: EvaluationOptions
) -> CalibratedExit:
    """Evaluate the topology with each early exit of `tried` and without; print the choice.

    `bound` is in points of accuracy. Raises the errors of `choose_exit` and `write_variants`, the
    latter's before anything starts.
    """
    with TemporaryDirectory(prefix="shell-router-calibrate-") as folder:
        variants = write_variants(topology, tried, Path(folder))
        return await choose_exit(variants, bound, replace(options, topologies=(Path(folder),)))


async def choose_exit(
    variants: Variants, bound: float, options: EvaluationOptions
) -> CalibratedExit:
    """Evaluate topologies that `options` serve, print the tables and the choice.

    Raises ShellRouterError where every early exit loses more than `bound`, and what
    `run_evaluation` raises.
    """
    report = await run_evaluation(
        replace(options, settings=tuple(variants), baseline=next(iter(variants)))
    )
    tried = [
        (settings, row) for row in report.rows if (settings := variants[row.setting]) is not None
    ]
    choice = choose(tried, bound)
    questions = report.rows[0].questions
    if choice is None:
        raise ShellRouterError(
            f"No early exit keeps the loss within {bound:g} points on these {questions} questions.",
            remedy="Keep early_exit off, or try --thresholds nearer to 1.",
        )
    print("\n".join(describe_outcome(choice, bound, questions)))
    return choice


def write_variants(topology: Path, tried: Tried, folder: Path) -> Variants:
    """Write a topology file per early exit, and one without. Raises ConfigError."""
    name = load_topology(topology).name
    document = yaml.safe_load(topology.read_text(encoding="utf-8"))
    variants: dict[str, Settings | None] = {f"{name}-without-exit": None}
    variants |= {
        "-".join([name, *map(str, settings.values())]): settings for settings in tried.settings()
    }
    for variant, settings in variants.items():
        text = yaml.safe_dump(
            replace_exit(document, variant, settings), sort_keys=False, allow_unicode=True
        )
        (folder / f"{variant}.yaml").write_text(text, encoding="utf-8")
    return variants


def describe_outcome(choice: CalibratedExit, bound: float, questions: int) -> list[str]:
    """Return the outcome in words, with the line for the topology file."""
    loss = choice.loss
    keys = ", ".join(f"{key}: {value}" for key, value in choice.settings.items())
    outcome = (
        f"It takes {choice.latency:.2f} of the latency and loses {loss.value:.2f} points (95 %: "
        f"{loss.low:.2f} to "
        f"{loss.high:.2f}) on {questions} questions; the bound is {bound:g}."
    )
    sure = "The whole interval is within the bound."
    if loss.high > bound:
        sure = (
            f"These questions cannot rule out a loss of {loss.high:.2f} points: more of them "
            "would narrow that."
        )
    lines = [f"early_exit: {{{keys}}}", outcome, sure]
    if choice.latency >= 1:
        lines.append("It saves no time: keep early_exit off.")
    return lines
