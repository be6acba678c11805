"""Trains what `auto` chooses by for a family of tiny models: who will be right, and how much they
write.

    python models/teach_router.py [sizes | specialists] [--questions N] [--out FOLDER] [--work
    FOLDER]

makes fresh questions (none of them in models/data), has a router on this machine ask all models of
the family, records what happened, and trains both predictors as a user would: with `shell-router
eval`, `train router` and `train lengths`. Specialists get a router alone, with an encoder that is
fine-tuned: a frozen one finds the topic of 63 % of the questions, this one of 92 %.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from training.family import FAMILIES
from training.problems import TOPICS, Topic, problems
from training.questions import as_line, held_out

from shell_router.cli import main as shell_router

HERE = Path(__file__).parent
FOLDERS = {"sizes": HERE, "specialists": HERE / "specialists"}


def main() -> int:
    """Ask, then train twice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "family", nargs="?", choices=FAMILIES, default="sizes", help="(default: sizes)"
    )
    parser.add_argument("--questions", type=int, default=4000, help="(default 4000)")
    parser.add_argument(
        "--concurrency", type=int, default=16, help="questions at once (default 16)"
    )
    parser.add_argument(
        "--encoder", default=str(HERE / "small"), help="the router's (default: the small model)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="(default: routing, in the family's folder)"
    )
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="keep questions, records and traces here"
    )
    chosen = parser.parse_args()
    if chosen.work is not None:
        chosen.work.mkdir(parents=True, exist_ok=True)
        return taught(chosen, chosen.work)
    with tempfile.TemporaryDirectory(prefix="shell-router-") as folder:
        return taught(chosen, Path(folder))


def taught(chosen: argparse.Namespace, work: Path) -> int:
    """The exit code of the first command that fails, or 0."""
    data, records, deployment = (
        work / "questions.jsonl",
        work / "records.jsonl",
        work / "deployment.yaml",
    )
    folder, models = FOLDERS[chosen.family], tuple(FAMILIES[chosen.family])
    topics = TOPICS if chosen.family == "specialists" else ()
    data.write_text("".join(fresh_questions(chosen.questions, topics)), encoding="utf-8")
    deployment.write_text(recording_deployment(folder, models), encoding="utf-8")
    out = chosen.out or folder / "routing"
    router, lengths = str(out / "router"), str(out / "lengths")
    asked = [
        "--config",
        str(deployment),
        "--data",
        str(data),
        "--concurrency",
        str(chosen.concurrency),
    ]
    train = [
        "train",
        "router",
        str(records),
        "--data",
        str(data),
        "--encoder",
        chosen.encoder,
        "--out",
        router,
    ]
    commands = [["eval", *asked, "--records", str(records), *models], train]
    if chosen.family == "specialists":
        train += ["--tune", "--epochs", "8", "--learning-rate", "1e-3"]
    else:  # specialists are of one size: which of them writes more decides nothing
        commands.append(
            [
                "train",
                "lengths",
                str(work / "traces"),
                "--trees",
                "50",
                "--leaf",
                "20",
                "--out",
                lengths,
            ]
        )
    return next((code for command in commands if (code := shell_router(command))), 0)


def fresh_questions(number: int, topics: Sequence[Topic]) -> list[str]:
    """Lines of a data file; nothing that the models are tested or calibrated with."""
    known = held_out()
    fresh = (
        one
        for one in problems(random.Random("routing"), topics=topics)
        if one.question not in known
    )
    return [as_line(one) for one in islice(fresh, number)]


def recording_deployment(folder: Path, models: Sequence[str]) -> str:
    """The models of `folder`, and everything recorded in the deployment's own folder, texts
    included.
    """
    lines = "".join(f"  {name}: {{path: {folder.resolve() / name}}}\n" for name in models)
    return f"models:\n{lines}embedder: {{model: none}}\nrecord: {{folder: traces, prompts: true}}\n"


if __name__ == "__main__":
    raise SystemExit(main())
