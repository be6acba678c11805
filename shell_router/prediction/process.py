"""The work of a predictor's process, which `PredictionService` starts."""

from collections.abc import Sequence
from pathlib import Path

import orjson

from shell_router.core.predictors import Prospect
from shell_router.launching.side_work import Work
from shell_router.prediction.lengths import LengthModel
from shell_router.prediction.scores import ScoreModel, load_scores


def predictor(kind: str, folder: str, device: str, threads: int) -> Work:
    """That of the predictor in `folder`. Raises ConfigError."""
    model: LengthModel | ScoreModel
    if kind == "lengths":
        model = LengthModel.load(Path(folder))
    else:
        model = load_scores(Path(folder), device=device, threads=threads)

    def work(bodies: Sequence[bytes]) -> list[tuple[bytes]]:
        """The prospects of all waiting calls are one batch."""
        calls = [
            [Prospect(**{**one, "models": tuple(one["models"])}) for one in orjson.loads(body)]
            for body in bodies
        ]
        answers = iter(model.answers([one for call in calls for one in call]))
        return [(orjson.dumps([next(answers) for _ in call]),) for call in calls]

    return work
