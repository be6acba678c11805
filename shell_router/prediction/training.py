"""A semantic router from graded answers to its folder."""

import os
from dataclasses import dataclass
from pathlib import Path

from shell_router.prediction.scores import ENCODER, Head, encoder_of, save_scores
from shell_router.prediction.teaching import (
    Lessons,
    RouterScore,
    TuningSettings,
    fine_tune,
    fit_head,
    judged_router,
)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """`encoder` stays as it is and gets a head, or with `tuning` is trained with it; `out` is the folder written."""

    out: Path
    encoder: str = "default"
    tuning: TuningSettings | None = None
    held_out: float = 0.2
    seed: int = 0
    device: str = "cpu"
    threads: int = 1


def train_router(lessons: Lessons, options: RouterOptions) -> RouterScore:
    """Train on all but the held-out questions, write the folder, and judge what it holds."""
    learned, held_out = lessons.split(options.held_out, options.seed)
    head, named = _tuned(learned, options) if options.tuning else _headed(learned, options)
    save_scores(options.out, head, named)
    encode = encoder_of(options.out, named, device=options.device, threads=options.threads)
    return judged_router(head.scores(encode(held_out.questions)), held_out)


def _headed(lessons: Lessons, options: RouterOptions) -> tuple[Head, str]:
    """A folder is named as seen from `out`, so that both may move together."""
    named = options.encoder
    if Path(named).is_dir():
        named = os.path.relpath(Path(named).resolve(), options.out.resolve())
        named = named if named.startswith(".") else f"./{named}"
    encode = encoder_of(options.out, named, device=options.device, threads=options.threads)
    return fit_head(encode(lessons.questions), lessons), named


def _tuned(lessons: Lessons, options: RouterOptions) -> tuple[Head, str]:
    assert options.tuning is not None
    folder = options.out / ENCODER
    return fine_tune(options.encoder, lessons, options.tuning, options.device, folder), ENCODER
