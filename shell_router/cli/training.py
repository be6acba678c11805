"""`shell-router train lengths` and `train router`."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shell_router.cli.arguments import Commands, positive
from shell_router.errors import ConfigError

if TYPE_CHECKING:
    from shell_router.prediction.fitting import LengthScore
    from shell_router.prediction.teaching import RouterScore


def add_commands(commands: Commands) -> None:
    """What `train` takes."""
    train = commands.add_parser("train", help="train what `auto` chooses by: lengths, and a router of questions")
    kinds = train.add_subparsers(required=True, metavar="KIND")
    _add_lengths(kinds.add_parser("lengths", help="how much agents write, from recorded traces"))
    _add_router(kinds.add_parser("router", help="who will be right, from graded answers"))


def _add_lengths(lengths: argparse.ArgumentParser) -> None:
    lengths.add_argument("traces", type=Path, nargs="+", metavar="TRACES", help="files, or the folder of `record`")
    lengths.add_argument("--trees", type=positive, default=100, help="of each forest (default 100)")
    lengths.add_argument("--leaf", type=positive, default=10, help="least runs in a leaf (default 10)")
    lengths.add_argument("--components", type=positive, default=16, help="numbers that sketch a text (default 16)")
    _add_common(lengths)
    lengths.set_defaults(command=_train_lengths)


def _add_router(router: argparse.ArgumentParser) -> None:
    router.add_argument("records", type=Path, nargs="+", metavar="RECORDS", help="of `shell-router eval --records`")
    router.add_argument("--data", type=Path, required=True, help="the questions that were asked")
    router.add_argument(
        "--encoder",
        default="default",
        help="sentence-transformers model or folder; with --tune any Hugging Face encoder",
    )
    router.add_argument("--tune", action="store_true", help="fine-tune the encoder, not only a head on top of it")
    router.add_argument("--epochs", type=positive, default=5, help="of fine-tuning (default 5)")
    router.add_argument("--learning-rate", type=float, default=1e-5, help="of fine-tuning (default 1e-5)")
    router.add_argument("--device", default="cpu", help="where it is trained (default cpu)")
    router.add_argument("--threads", type=positive, default=1, help="CPU threads (default 1)")
    _add_common(router)
    router.set_defaults(command=_train_router)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the predictor is written")
    command.add_argument("--held-out", type=float, default=0.2, help="share that only judges (default 0.2)")
    command.add_argument("--seed", type=int, default=0, help="fixes what is held out and drawn (default 0)")


def _train_lengths(chosen: argparse.Namespace) -> int:
    _check_share(chosen.held_out)
    _require_learners()
    from shell_router.prediction.fitting import ForestSettings, train_lengths
    from shell_router.prediction.traces import read_traces

    settings = ForestSettings(
        chosen.trees, chosen.leaf, components=chosen.components, held_out=chosen.held_out, seed=chosen.seed
    )
    model, scores = train_lengths(read_traces(chosen.traces), settings)
    model.save(chosen.out)
    _print_table("Pairs in the wrong order (Kendall's tau distance), held-out programs", _length_rows(scores))
    if model.features.sketch is None:
        print("The traces hold no texts (record.prompts is off), so that lengths are told without them.")
    print(f"Written to {chosen.out}.")
    return 0


def _length_rows(scores: "Sequence[LengthScore]") -> list[Mapping[str, str]]:
    return [
        {
            "model": one.model,
            "runs": str(one.runs),
            "forest": f"{one.forest:.3f}",
            "first come": f"{one.first_come:.3f}",
            "input length": f"{one.input_length:.3f}",
            "median error, tokens": f"{one.error_tokens:.1f}",
        }
        for one in scores
    ]


def _train_router(chosen: argparse.Namespace) -> int:
    _check_share(chosen.held_out)
    _require_learners()
    from shell_router.evaluation.graded import read_graded
    from shell_router.prediction.teaching import TuningSettings, lessons_of
    from shell_router.prediction.training import RouterOptions, train_router

    tuning = TuningSettings(chosen.epochs, chosen.learning_rate, seed=chosen.seed) if chosen.tune else None
    options = RouterOptions(
        chosen.out, chosen.encoder, tuning, chosen.held_out, chosen.seed, chosen.device, chosen.threads
    )
    _print_router(train_router(lessons_of(read_graded(chosen.records, chosen.data)), options))
    print(f"Written to {chosen.out}.")
    return 0


def _print_router(score: "RouterScore") -> None:
    row = {
        "questions": str(score.questions),
        "mAP": f"{score.mean_precision:.3f}",
        "mAP of guessing": f"{score.chance_precision:.3f}",
        **{f"{model} alone": f"{share:.1%}" for model, share in score.alone.items()},
        "highest score": f"{score.chosen:.1%}",
        "any": f"{score.oracle:.1%}",
    }
    _print_table("Held-out questions", [row])


def _print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for key in rows[0] if rows else ():
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ConfigError(f"--held-out must be above 0 and below 1, not {share:g}.")


def _require_learners() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("sklearn", "quantile_forest") if find_spec(name) is None]:
        raise ConfigError(f"Training needs {' and '.join(missing)}.", remedy="pip install 'shell-router[predict]'")
