"""The process of one predictor, which `PredictionService` starts."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from shell_router.core.predictors import Prospect
from shell_router.launching.side_work import Work, serve


def main() -> None:
    """Serve the predictor that the command line names (see PredictionService)."""
    kind, folder, device, threads, max_batch, gather_s = sys.argv[1:]

    def load() -> Work:
        # loaded late, so that the end of the input is noticed meanwhile
        from shell_router.prediction.lengths import LengthModel  # noqa: PLC0415
        from shell_router.prediction.scores import load_scores  # noqa: PLC0415

        if kind == "lengths":
            return predicting(LengthModel.load(Path(folder)).answers)
        return predicting(load_scores(Path(folder), device=device, threads=int(threads)).answers)

    serve(load, int(max_batch), float(gather_s))


def predicting(predict: Callable[[Sequence[Prospect]], Sequence[Any]]) -> Work:
    """`predict` as the process's work: the prospects of all waiting calls are one batch."""

    def work(bodies: Sequence[bytes]) -> list[tuple[bytes]]:
        calls = [[Prospect(**{**one, "models": tuple(one["models"])}) for one in orjson.loads(body)] for body in bodies]
        answers = iter(predict([one for call in calls for one in call]))
        return [(orjson.dumps([next(answers) for _ in call]),) for call in calls]

    return work


if __name__ == "__main__":
    main()
