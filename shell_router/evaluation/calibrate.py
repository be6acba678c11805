"""Runs a calibration: writes a topology per threshold, evaluates them, and says which one to take."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from shell_router.errors import ShellRouterError
from shell_router.evaluation.calibration import Choice, check_calibrates, check_thresholds, choose, variants
from shell_router.evaluation.options import EvaluationOptions
from shell_router.evaluation.run import evaluate
from shell_router.topology import load_topology


async def run_calibration(
    topology: Path, thresholds: Sequence[float], bound: float, options: EvaluationOptions
) -> Choice:
    """Evaluate the topology file at each of `thresholds` and without early exit; print the tables and the choice.

    `bound` is in points of accuracy. Raises ConfigError, before anything starts, where `thresholds` are none or it is
    not they that decide the topology's exits, and what `calibrated` raises.
    """
    with TemporaryDirectory(prefix="shell-router-calibrate-") as folder:
        names = write_variants(topology, thresholds, Path(folder))
        return await calibrated(names, bound, replace(options, topologies=(Path(folder),)))


async def calibrated(names: Mapping[float | None, str], bound: float, options: EvaluationOptions) -> Choice:
    """Evaluate topologies that `options` serve, named by threshold, and under None the one without early exit.

    Prints the tables and the choice. Raises ShellRouterError where every threshold loses more than `bound`, where a
    file could not be written, which is told last, and what `run_evaluation` raises.
    """
    outcome = await evaluate(replace(options, settings=tuple(names.values()), baseline=names[None]))
    rows = {row.setting: row for row in outcome.report.rows}
    choice = choose({one: rows[name] for one, name in names.items() if one is not None}, bound)
    questions = outcome.report.rows[0].questions
    if choice is None:
        raise ShellRouterError(
            f"No threshold keeps the loss within {bound:g} points on these {questions} questions.",
            remedy=" ".join(("Keep early_exit off, or try --thresholds nearer to 1.", *outcome.trouble)),
        )
    print("\n".join(said(choice, bound, questions)))
    outcome.refuse_trouble()
    return choice


def write_variants(topology: Path, thresholds: Sequence[float], folder: Path) -> dict[float | None, str]:
    """A topology file per threshold, and one without early exit (None): their names. Raises ConfigError."""
    check_thresholds(thresholds)
    loaded = load_topology(topology)
    check_calibrates(loaded)
    documents = variants(yaml.safe_load(topology.read_text(encoding="utf-8")), loaded.name, thresholds)
    for document in documents.values():
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        (folder / f"{document['name']}.yaml").write_text(text, encoding="utf-8")
    return {threshold: str(document["name"]) for threshold, document in documents.items()}


def said(choice: Choice, bound: float, questions: int) -> list[str]:
    """The outcome in words."""
    loss = choice.loss
    outcome = (
        f"threshold: {choice.threshold:g} loses {loss.value:.2f} points (95 %: {loss.low:.2f} to {loss.high:.2f}) on "
        f"{questions} questions; the bound is {bound:g}."
    )
    if choice.within(bound):
        return [outcome, "The whole interval is within the bound."]
    return [
        outcome,
        f"These questions cannot rule out a loss of {loss.high:.2f} points: more of them would narrow that.",
    ]
