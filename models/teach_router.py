"""Trains what `auto` chooses by for the three tiny models: who will be right, and how much they write.

    python models/teach_router.py [--questions N] [--out FOLDER] [--work FOLDER]

makes fresh questions (none of them in models/data), has a router on this machine ask all three models, records what
happened, and trains both predictors as a user would: with `shell-router eval`, `train router` and `train lengths`.
"""

import argparse
import json
import random
import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from training.problems import problems
from training.questions import held_out

from shell_router.cli import main as shell_router

HERE = Path(__file__).parent
MODELS = ("small", "medium", "large")


def main() -> int:
    """Ask, then train twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=4000, help="(default 4000)")
    parser.add_argument("--concurrency", type=int, default=16, help="questions at once (default 16)")
    parser.add_argument("--encoder", default=str(HERE / "small"), help="the router's (default: the small model)")
    parser.add_argument("--out", type=Path, default=HERE / "routing", metavar="FOLDER")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep questions, records and traces here")
    chosen = parser.parse_args()
    if chosen.work is not None:
        chosen.work.mkdir(parents=True, exist_ok=True)
        return taught(chosen, chosen.work)
    with tempfile.TemporaryDirectory(prefix="shell-router-") as folder:
        return taught(chosen, Path(folder))


def taught(chosen: argparse.Namespace, work: Path) -> int:
    """The exit code of the first command that fails, or 0."""
    data, records, deployment = work / "questions.jsonl", work / "records.jsonl", work / "deployment.yaml"
    data.write_text("".join(fresh_questions(chosen.questions)), encoding="utf-8")
    deployment.write_text(recording_deployment(), encoding="utf-8")
    router, lengths = str(chosen.out / "router"), str(chosen.out / "lengths")
    asked = ["--config", str(deployment), "--data", str(data), "--concurrency", str(chosen.concurrency)]
    commands = (
        ["eval", *asked, "--records", str(records), *MODELS],
        ["train", "router", str(records), "--data", str(data), "--encoder", chosen.encoder, "--out", router],
        ["train", "lengths", str(work / "traces"), "--trees", "50", "--leaf", "20", "--out", lengths],
    )
    return next((code for command in commands if (code := shell_router(command))), 0)


def fresh_questions(number: int) -> list[str]:
    """Lines of a data file; nothing that the models are tested or calibrated with."""
    known = held_out()
    fresh = (one for one in problems(random.Random("routing")) if one.question not in known)
    return [json.dumps(asdict(one)) + "\n" for one in islice(fresh, number)]


def recording_deployment() -> str:
    """The three models, and everything recorded in the same folder, texts included."""
    models = "".join(f"  {name}: {{path: {HERE.resolve() / name}}}\n" for name in MODELS)
    return f"models:\n{models}embedder: {{model: none}}\nrecord: {{folder: traces, prompts: true}}\n"


if __name__ == "__main__":
    raise SystemExit(main())
