"""The work of a predictor's process, which `PredictionService` starts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from shell_router.core.predictors import Prospect
from shell_router.launching.side_work import Work
from shell_router.prediction.lengths import LengthModel
from shell_router.prediction.scores import load_scores


def predictor(kind: str, folder: str, device: str, threads: int) -> Work:
    """That of the predictor in `folder`. Raises ConfigError."""
    if kind == "lengths":
        return predicting(LengthModel.load(Path(folder)).answers)
    return predicting(load_scores(Path(folder), device=device, threads=threads).answers)


def predicting(predict: Callable[[Sequence[Prospect]], Sequence[Any]]) -> Work:
    """`predict` as the process's work: the prospects of all waiting calls are one batch."""

    def work(bodies: Sequence[bytes]) -> list[tuple[bytes]]:
        calls = [[Prospect(**{**one, "models": tuple(one["models"])}) for one in orjson.loads(body)] for body in bodies]
        answers = iter(predict([one for call in calls for one in call]))
        return [(orjson.dumps([next(answers) for _ in call]),) for call in calls]

    return work
