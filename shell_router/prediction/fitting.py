"""Training of length predictors on traces, and their quality (Chimera, table 3)."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from quantile_forest import RandomForestQuantileRegressor
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from shell_router.core.predictors import Prospect
from shell_router.errors import DataError, require
from shell_router.files.document import read_json_lines
from shell_router.prediction.lengths import (
    LEAF,
    Forest,
    LengthFeatures,
    LengthModel,
    Places,
    Sketch,
)

RECORDED = "Name files that the router recorded."


class TraceLine(BaseModel):
    """A line of a trace file: an agent's run, and the agents that it `reads`."""

    program: str
    topology: str
    agent: str
    stage: str
    model: str
    state: str
    reads: list[str] = []
    user: str = ""
    system_tokens: int
    user_tokens: int
    known_tokens: int
    output_tokens: int
    prompt_tokens: int = 0
    started_at: float
    started_s: float


@dataclass(frozen=True, slots=True)
class TracedRun:
    """An agent's run in a recorded program.

    `prospect` is what was known before the run, `total_tokens` what it and all agents after it
    wrote. The run is `whole` if all of these ran to their ends.
    """

    program: str
    prospect: Prospect
    model: str
    own_tokens: int
    total_tokens: int
    prompt_tokens: int
    arrived_s: float
    whole: bool


def read_traces(paths: Sequence[Path]) -> list[TracedRun]:
    """Read the runs of files, and of all .jsonl files of folders, in order of arrival.

    Raises ConfigError.
    """
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]
    require(
        bool(files), "There are no .jsonl files.", "Name the folder that `record.folder` names."
    )
    programs: dict[str, list[TraceLine]] = defaultdict(list)
    for file in files:
        for where, fields in read_json_lines(file, RECORDED):
            try:
                line = TraceLine.model_validate(fields)
            except ValidationError as error:
                wrong = f"{where}: this is not a line of a trace file."
                raise DataError(wrong, remedy=RECORDED) from error
            programs[line.program].append(line)
    runs = [run for lines in programs.values() for run in _list_runs(lines)]
    require(
        bool(runs),
        "The traces hold no run.",
        "Record some: docs/how-to/choose-models.md explains it.",
    )
    return sorted(runs, key=lambda run: run.arrived_s)


def _list_runs(lines: Sequence[TraceLine]) -> Iterator[TracedRun]:
    """Yield the runs of one program."""
    by_agent = {line.agent: line for line in lines}
    readers: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        for precursor in line.reads:
            readers[precursor].append(line.agent)
    for line in lines:
        # the agent, and all that read it, directly or not
        following = set()
        frontier = [line.agent]
        while frontier:
            agent = frontier.pop()
            if agent not in following:
                following.add(agent)
                frontier.extend(readers[agent])
        after = [by_agent[agent] for agent in following]
        yield TracedRun(
            line.program,
            Prospect(
                line.topology,
                line.stage,
                line.user,
                line.system_tokens,
                line.user_tokens,
                line.known_tokens,
                (line.model,),
                scored=False,
            ),
            line.model,
            line.output_tokens,
            sum(other.output_tokens for other in after),
            line.prompt_tokens or line.known_tokens,
            line.started_at + line.started_s,
            line.state == "finished"
            and all(other.state in ("finished", "skipped") for other in after),
        )


def kendall_distance(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Return the share of pairs with different true values that `predicted` orders wrongly.

    A tie in `predicted` counts half. 0 is the right order, 1 the opposite, 0.5 chance. NaN if no
    two true values differ.
    """
    guess = np.asarray(predicted, dtype=float)
    truth = np.asarray(true, dtype=float)
    wrong = pairs = 0.0
    for place in range(len(truth) - 1):
        real = np.sign(truth[place + 1 :] - truth[place])
        seen = np.sign(guess[place + 1 :] - guess[place])
        counted = real != 0
        pairs += counted.sum()
        wrong += (seen[counted] == -real[counted]).sum() + 0.5 * (seen[counted] == 0).sum()
    if pairs:
        return float(wrong / pairs)
    return float("nan")


LEAST_PROGRAMS = 10


TREES = 100
LEAST_RUNS = 10
"""Of a forest, and in a leaf."""
TERMS = 2000
COMPONENTS = 16
"""Of the texts' sketch: terms that it knows, and numbers that it reduces a text to."""


@dataclass(frozen=True, slots=True)
class LengthScore:
    """Shares of one model's held-out runs that are in the wrong order, and the median error."""

    model: str
    runs: int
    forest: float
    first_come: float
    input_length: float
    error_tokens: float


def train_lengths(
    runs: Sequence[TracedRun], held_out: float = 0.2, seed: int = 0
) -> tuple[LengthModel, list[LengthScore]]:
    """Train a predictor on whole runs; the share `held_out` of their programs judges it.

    Raises ConfigError for too few programs.
    """
    ended = [run for run in runs if run.whole]
    programs = sorted({run.program for run in ended})
    require(
        len(programs) >= LEAST_PROGRAMS,
        f"{len(programs)} whole programs are too few to train on.",
        "Record more.",
    )
    random.Random(seed).shuffle(programs)
    judging = set(programs[: min(max(1, round(held_out * len(programs))), len(programs) - 1)])
    model = fit_lengths([run for run in ended if run.program not in judging], seed)
    return model, judge_lengths(model, [run for run in ended if run.program in judging])


def fit_lengths(runs: Sequence[TracedRun], seed: int) -> LengthModel:
    """Fit two forests: of an agent's own tokens, and of those from it to its program's end."""
    features = LengthFeatures(
        sorted({run.prospect.workflow for run in runs}),
        sorted({run.prospect.stage for run in runs}),
        sorted({run.model for run in runs}),
        _fit_sketch([run.prospect.user for run in runs], seed),
    )
    rows = features.rows([(run.prospect, run.model) for run in runs])

    def forest(targets: Sequence[float]) -> Forest:
        """Fit a forest that keeps all targets of its leaves."""
        fitted = RandomForestQuantileRegressor(
            TREES,
            min_samples_leaf=LEAST_RUNS,
            max_samples_leaf=None,
            random_state=seed,
            n_jobs=1,
        )
        return export_forest(fitted.fit(rows, np.asarray(targets, dtype=float)))

    return LengthModel(
        features,
        forest([run.own_tokens for run in runs]),
        forest([run.total_tokens for run in runs]),
    )


def export_forest(forest: RandomForestQuantileRegressor) -> Forest:
    """Return the arrays of a fitted forest.

    Its leaves hold training targets by number, counted from 1; 0 is none.
    """
    trees = [estimator.tree_ for estimator in forest.estimators_]
    offsets = np.cumsum([0, *(tree.node_count for tree in trees)])
    places = np.asarray(forest.forest_.y_train_leaves)
    targets = np.asarray(forest.forest_.y_train)[0]
    leaves = [
        np.sort(targets[held[held > 0] - 1]).astype(np.float32)
        for number, tree in enumerate(trees)
        for held in places[number, : tree.node_count, 0]
    ]
    ends = np.cumsum([len(leaf) for leaf in leaves]).astype(np.int32)
    return Forest(
        offsets[:-1].astype(np.int32),
        _shift_links([tree.children_left for tree in trees], offsets),
        _shift_links([tree.children_right for tree in trees], offsets),
        np.concatenate([np.maximum(tree.feature, 0) for tree in trees]).astype(np.int32),
        np.concatenate([tree.threshold for tree in trees]),
        np.concatenate([[0], ends[:-1]]).astype(np.int32),
        ends,
        np.concatenate(leaves),
    )


def _shift_links(trees: Sequence[NDArray[np.int64]], offsets: NDArray[np.int64]) -> Places:
    """Return all trees' links to children, counted from the forest's first node."""
    shifted = [
        np.where(children == LEAF, LEAF, children + offset)
        for children, offset in zip(trees, offsets, strict=False)
    ]
    return np.concatenate(shifted).astype(np.int32)


def _fit_sketch(texts: Sequence[str], seed: int) -> Sketch | None:
    """Fit a sketch of texts; None if none were recorded."""
    if not any(texts):
        return None
    vectors = TfidfVectorizer(ngram_range=(1, 2), max_features=TERMS)
    try:
        weighed = vectors.fit_transform(texts)
    except ValueError:  # no word of two letters in any of them
        return None
    components = min(COMPONENTS, weighed.shape[1] - 1)
    if components < 1:
        return None
    projection = TruncatedSVD(components, random_state=seed).fit(weighed).components_.T
    vocabulary = {term: int(row) for term, row in vectors.vocabulary_.items()}
    return Sketch(vocabulary, vectors.idf_, projection)


def judge_lengths(model: LengthModel, runs: Sequence[TracedRun]) -> list[LengthScore]:
    """Score per model how the predictor, arrival, and the prompt's length order `runs`."""
    scores = []
    for name in model.features.models:
        of = [run for run in runs if run.model == name]
        predicted = [
            answer["total_tokens"][name] for answer in model.answers([run.prospect for run in of])
        ]
        true = [float(run.total_tokens) for run in of]
        if of:
            by_arrival = kendall_distance([run.arrived_s for run in of], true)
            by_input = kendall_distance([float(run.prompt_tokens) for run in of], true)
            error = float(np.median(np.abs(np.array(predicted) - np.array(true))))
            scores.append(
                LengthScore(
                    name, len(of), kendall_distance(predicted, true), by_arrival, by_input, error
                )
            )
    return scores
