"""The work of a predictor's process, which `PredictionService` starts."""

from collections.abc import Sequence
from pathlib import Path

from shell_router.core.predictors import Prospect
from shell_router.prediction.lengths import LengthModel
from shell_router.prediction.scores import ScoreModel, load_scores
from shell_router.processes.worker import Work


def predictor_work(kind: str, folder: str, device: str, threads: int) -> Work:
    """Load the predictor in `folder` and return its work. Raises ConfigError."""
    model: LengthModel | ScoreModel
    if kind == "lengths":
        model = LengthModel.load(Path(folder))
    else:
        model = load_scores(Path(folder), device=device, threads=threads)

    def predict(calls: Sequence[Sequence[Prospect]]) -> list[list[object]]:
        """Answer the prospects of all calls as one batch."""
        prospects = [prospect for call in calls for prospect in call]
        answers = iter(model.answers(prospects))
        return [[next(answers) for _ in call] for call in calls]

    return predict
