"""Training of the semantic router on graded answers (Chimera, 3.3), judged on held-out ones."""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

from shell_router.errors import require
from shell_router.prediction.files import DEFAULT_ENCODER, Vectors
from shell_router.prediction.scores import ENCODER, Graded, Head, load_encoder, save_scores

LEAST_QUESTIONS = 20


@dataclass(frozen=True, slots=True)
class Lessons:
    """Questions, and the share of right answers [questions, models]; NaN without any answer."""

    questions: tuple[str, ...]
    models: tuple[str, ...]
    right: NDArray[np.float64]

    def part(self, places: Sequence[int]) -> "Lessons":
        """Return the lessons at `places`."""
        return Lessons(
            tuple(self.questions[place] for place in places), self.models, self.right[list(places)]
        )

    def split(self, held_out: float, seed: int) -> tuple["Lessons", "Lessons"]:
        """Split off the share `held_out` at random: the lessons to learn from, and to judge by."""
        places = list(range(len(self.questions)))
        random.Random(seed).shuffle(places)
        judging = min(max(1, round(held_out * len(places))), len(places) - 1)
        return self.part(sorted(places[judging:])), self.part(sorted(places[:judging]))


def collect_lessons(answers: Sequence[Graded]) -> Lessons:
    """Collect answers; several of a model to one question count as their mean.

    Raises ConfigError for too few.
    """
    questions = tuple(dict.fromkeys(answer.question for answer in answers))
    models = tuple(dict.fromkeys(answer.model for answer in answers))
    require(
        len(questions) >= LEAST_QUESTIONS and len(models) > 1,
        f"{len(questions)} questions answered by {len(models)} models are too few to learn from.",
        f"Ask at least two models at least {LEAST_QUESTIONS} questions: see "
        "docs/how-to/choose-models.md.",
    )
    return Lessons(questions, models, _average_grades(answers, questions, models))


def _average_grades(
    answers: Sequence[Graded], questions: Sequence[str], models: Sequence[str]
) -> NDArray[np.float64]:
    """Return the mean grade by question and model; NaN where a model has no answer."""
    places = {question: place for place, question in enumerate(questions)}
    columns = {model: column for column, model in enumerate(models)}
    sums = np.zeros((len(questions), len(models)))
    counts = np.zeros((len(questions), len(models)))
    for answer in answers:
        index = places[answer.question], columns[answer.model]
        sums[index] += answer.right
        counts[index] += 1
    with np.errstate(invalid="ignore"):
        return sums / counts


def fit_head(vectors: Vectors, lessons: Lessons) -> Head:
    """Fit a logistic regression per model on scaled features, with a little weight decay."""
    mean = vectors.mean(axis=0)
    scale = vectors.std(axis=0) + 1e-6
    scaled = (vectors - mean) / scale
    weights = []
    bias = []
    for column in range(len(lessons.models)):
        answered = ~np.isnan(lessons.right[:, column])
        fit = _fit_model(scaled[answered], lessons.right[answered, column] >= 0.5)
        weights.append(fit[:-1] / scale)
        bias.append(fit[-1] - float((fit[:-1] / scale) @ mean))
    return Head(
        lessons.models, np.array(weights, dtype=np.float64).T, np.array(bias, dtype=np.float64)
    )


def _fit_model(scaled: Vectors, right: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the weights and then the bias; a model always or never right has only a bias."""
    if right.all() or not right.any():
        share = (right.sum() + 1) / (len(right) + 2)
        return np.append(np.zeros(scaled.shape[1]), np.log(share / (1 - share)))
    # C is per example: hundreds of features must not be fitted to the noise of few questions
    regression = LogisticRegression(C=1.0 / scaled.shape[1], max_iter=2000).fit(scaled, right)
    return np.append(regression.coef_[0], regression.intercept_[0])


@dataclass(frozen=True, slots=True)
class RouterScore:
    """The quality of a router on held-out questions.

    Attributes:
        questions: The number of questions.
        mean_precision: Macro mean average precision.
        chance_precision: The same of guessing: the models' shares of right answers.
        alone: The share of right answers of each model alone.
        chosen: The share of right answers of the highest-scored models.
        oracle: The share of questions that any model answers rightly.
    """

    questions: int
    mean_precision: float
    chance_precision: float
    alone: Mapping[str, float]
    chosen: float
    oracle: float


def judge_router(scores: NDArray[np.float64], lessons: Lessons) -> RouterScore:
    """Score how well `scores` [questions, models] order the models' answers.

    Questions that some model lacks count for precision only.
    """
    precisions = []
    shares = []
    for column in range(len(lessons.models)):
        answered = ~np.isnan(lessons.right[:, column])
        right = lessons.right[answered, column] >= 0.5
        if right.any():
            precisions.append(float(average_precision_score(right, scores[answered, column])))
            shares.append(float(right.mean()))
    whole = ~np.isnan(lessons.right).any(axis=1)
    right = lessons.right[whole]
    chosen = right[np.arange(len(right)), scores[whole].argmax(axis=1)]
    return RouterScore(
        len(lessons.questions),
        _mean(precisions),
        _mean(shares),
        {model: _mean(right[:, column]) for column, model in enumerate(lessons.models)},
        _mean(chosen),
        _mean(right.max(axis=1)),
    )


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    if len(values):
        return float(np.mean(values))
    return float("nan")


@dataclass(frozen=True, slots=True)
class TuningSettings:
    """The settings of fine-tuning (Chimera, appendix B.1)."""

    epochs: int = 5
    learning_rate: float = 1e-5
    batch: int = 16
    seed: int = 0


def fine_tune(
    encoder: str,
    lessons: Lessons,
    settings: TuningSettings,
    out: Path,
    *,
    device: str,
    threads: int,
) -> Head:
    """Train an encoder and a head together by binary cross entropy; save the encoder in `out`."""
    import torch  # noqa: PLC0415 - the light way needs none of it

    from shell_router.prediction.encoders import load_model, pool_states  # noqa: PLC0415

    torch.set_num_threads(threads)
    torch.manual_seed(settings.seed)
    tokenizer, model = load_model(encoder, device)
    head = torch.nn.Linear(model.config.hidden_size, len(lessons.models)).to(device)
    optimizer = torch.optim.AdamW(
        [*model.parameters(), *head.parameters()], lr=settings.learning_rate
    )
    places = list(range(len(lessons.questions)))
    model.train()
    for epoch in range(settings.epochs):
        random.Random(f"{settings.seed}/{epoch}").shuffle(places)
        for begin in range(0, len(places), settings.batch):
            part = lessons.part(places[begin : begin + settings.batch])
            answered = torch.tensor(~np.isnan(part.right), device=device)
            right = torch.tensor(np.nan_to_num(part.right), dtype=torch.float32, device=device)
            logits = head(pool_states(model, tokenizer, part.questions))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits[answered], right[answered]
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch types it only in part
            optimizer.step()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    weights = head.weight.detach().cpu().double().numpy().T
    return Head(lessons.models, weights, head.bias.detach().cpu().double().numpy())


def train_router(
    lessons: Lessons,
    out: Path,
    *,
    encoder: str = DEFAULT_ENCODER,
    tuning: TuningSettings | None = None,
    held_out: float = 0.2,
    seed: int = 0,
    device: str = "cpu",
    threads: int = 1,
) -> RouterScore:
    """Train a router, write it to the folder `out`, and judge it on held-out questions.

    Without `tuning` the `encoder` is frozen and only the head is trained.
    """
    learned, judging = lessons.split(held_out, seed)
    if tuning:
        name = ENCODER
        head = fine_tune(encoder, learned, tuning, out / ENCODER, device=device, threads=threads)
    else:
        name = encoder
        if Path(name).is_dir():  # relative to `out`, so that both may move together
            name = os.path.relpath(Path(name).resolve(), out.resolve())
            if not name.startswith("."):
                name = f"./{name}"
        encode = load_encoder(out, name, device=device, threads=threads)
        head = fit_head(encode(learned.questions), learned)
    save_scores(out, head, name)
    encode = load_encoder(out, name, device=device, threads=threads)
    return judge_router(head.scores(encode(judging.questions)), judging)
