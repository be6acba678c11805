"""`shell-router train`: lengths, router."""

from pathlib import Path
from typing import Annotated

import typer

from shell_router.cli.options import Seed, argument, examples, option
from shell_router.errors import ConfigError

app = typer.Typer(help="Train the predictors that `auto` chooses models by.", no_args_is_help=True)

Out = Annotated[Path, option("Folder that the predictor is written to.", metavar="FOLDER")]
HeldOut = Annotated[float, option("Share of the data that only evaluates the predictor.")]


@app.command(epilog=examples("shell-router train lengths traces/ --out predictors/lengths"))
def lengths(
    traces: Annotated[list[Path], argument("TRACES", "Trace files, or the folder of `record`.")],
    out: Out,
    held_out: HeldOut = 0.2,
    seed: Seed = 0,
) -> None:
    """Train a predictor of output lengths on recorded traces."""
    _check(held_out)
    from shell_router.lab.tables import print_table
    from shell_router.prediction.fitting import read_traces, train_lengths

    model, scores = train_lengths(read_traces(traces), held_out, seed)
    model.save(out)
    rows = [
        {
            "model": score.model,
            "runs": str(score.runs),
            "forest": f"{score.forest:.3f}",
            "first come": f"{score.first_come:.3f}",
            "input length": f"{score.input_length:.3f}",
            "median error, tokens": f"{score.error_tokens:.1f}",
        }
        for score in scores
    ]
    print_table("Pairs in the wrong order (Kendall's tau distance), held-out programs", rows)
    if model.features.sketch is None:
        print(
            "The traces hold no texts (record.prompts is off): lengths are predicted without them."
        )
    print(f"Written to {out}.")


@app.command(
    epilog=examples(
        "shell-router train router graded.jsonl --data questions.jsonl --out predictors/router"
    )
)
def router(
    records: Annotated[
        list[Path], argument("RECORDS", "Graded answers of `shell-router eval --records`.")
    ],
    data: Annotated[Path, option("The questions that were asked.", metavar="FILE")],
    out: Out,
    encoder: Annotated[
        str,
        option("A sentence-transformers model or folder; with --tune any Hugging Face encoder."),
    ] = "default",
    tune: Annotated[
        bool, option("Fine-tune the encoder instead of training only a head.", "--tune")
    ] = False,
    epochs: Annotated[int | None, option("Epochs of fine-tuning. Default: 5.", least=1)] = None,
    rate: Annotated[
        float | None, option("Learning rate of fine-tuning. Default: 1e-5.", "--learning-rate")
    ] = None,
    device: Annotated[str, option("Torch device to train on.")] = "cpu",
    threads: Annotated[int, option("CPU threads.", least=1)] = 1,
    held_out: HeldOut = 0.2,
    seed: Seed = 0,
) -> None:
    """Train a router on graded answers.

    It predicts, per model, the probability of a correct answer.
    """
    _check(held_out)
    if not tune and (epochs, rate) != (None, None):
        raise ConfigError(
            "--epochs and --learning-rate go with --tune.",
            remedy="Without it only a head is trained.",
        )
    from shell_router.lab.evaluation.records import read_graded
    from shell_router.lab.tables import print_table
    from shell_router.prediction.teaching import TuningSettings, collect_lessons, train_router

    score = train_router(
        collect_lessons(read_graded(records, data)),
        out,
        encoder=encoder,
        tuning=TuningSettings(epochs or 5, 1e-5 if rate is None else rate, seed=seed)
        if tune
        else None,
        held_out=held_out,
        seed=seed,
        device=device,
        threads=threads,
    )
    row = {
        "questions": str(score.questions),
        "mAP": f"{score.mean_precision:.3f}",
        "mAP of guessing": f"{score.chance_precision:.3f}",
        **{f"{model} alone": f"{share:.1%}" for model, share in score.alone.items()},
        "highest score": f"{score.chosen:.1%}",
        "any": f"{score.oracle:.1%}",
    }
    print_table("Held-out questions", [row])
    print(f"Written to {out}.")


def _check(held_out: float) -> None:
    """Raise ConfigError for a share out of range, and where training's packages are missing."""
    from importlib.util import find_spec

    if not 0 < held_out < 1:
        raise ConfigError(f"--held-out must be above 0 and below 1, not {held_out:g}.")
    if missing := [name for name in ("sklearn", "quantile_forest") if find_spec(name) is None]:
        raise ConfigError(
            f"Training needs {' and '.join(missing)}.", remedy="pip install 'shell-router[predict]'"
        )
