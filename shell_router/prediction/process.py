"""A prediction process: prospects to scores or lengths (`side_process`)."""

# ruff: noqa: PLC0415 - what a kind of model needs is loaded late, so that the end of the input is seen meanwhile

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from shell_router.core.prediction import Prospect
from shell_router.prediction.wire import Answers, packed_answers, unpacked_prospects
from shell_router.side_process.serving import Work, serve

Predict = Callable[[Sequence[Prospect]], Answers]


def main() -> None:
    """Serve the predictor named on the command line."""
    settings = _arguments()
    serve(lambda: predicting(_load(settings)), settings.max_batch, settings.gather_s)


def predicting(predict: Predict) -> Work:
    """`predict` as the process's work: the prospects of all calls that wait are one batch."""

    def work(bodies: Sequence[bytes]) -> list[tuple[bytes]]:
        calls = [unpacked_prospects(body) for body in bodies]
        answers = iter(predict([one for call in calls for one in call]))
        return [(packed_answers([next(answers) for _ in call]),) for call in calls]

    return work


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shell_router.prediction.process")
    parser.add_argument("kind", choices=("scores", "lengths"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--gather-s", type=float, required=True)
    return parser.parse_args()


def _load(settings: argparse.Namespace) -> Predict:
    if settings.kind == "lengths":
        from shell_router.prediction.lengths import LengthModel

        return LengthModel.load(settings.folder).answers
    from shell_router.prediction.scores import load_scores

    return load_scores(settings.folder, device=settings.device, threads=settings.threads).answers


if __name__ == "__main__":
    main()
