"""Fits length predictors, and tells how well they order what they did not see (Chimera, table 3)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from quantile_forest import RandomForestQuantileRegressor
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from shell_router.errors import ConfigError
from shell_router.prediction.forest import LEAF, Floats, Forest, Places
from shell_router.prediction.lengths import Features, LengthModel
from shell_router.prediction.ranking import kendall_distance
from shell_router.prediction.sketch import Sketch
from shell_router.prediction.traces import TracedRun

LEAST_PROGRAMS = 10


@dataclass(frozen=True, slots=True)
class ForestSettings:
    """`terms` and `components` are of the text's sketch. `held_out` is the share of programs that only judge."""

    trees: int = 100
    leaf: int = 10
    terms: int = 2000
    components: int = 16
    held_out: float = 0.2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LengthScore:
    """Of one model's held-out runs: shares of pairs in the wrong order, and the median error in tokens."""

    model: str
    runs: int
    forest: float
    first_come: float
    input_length: float
    error_tokens: float


def train_lengths(runs: Sequence[TracedRun], settings: ForestSettings) -> tuple[LengthModel, list[LengthScore]]:
    """A predictor of `runs` that ended, trained on all but the held-out programs. Raises ConfigError for too few."""
    ended = [run for run in runs if run.whole]
    programs = sorted({run.program for run in ended})
    if len(programs) < LEAST_PROGRAMS:
        raise ConfigError(f"{len(programs)} whole programs are too few to learn from.", remedy="Record more.")
    random.Random(settings.seed).shuffle(programs)
    judging = set(programs[: max(1, round(settings.held_out * len(programs)))])
    model = fit_lengths([run for run in ended if run.program not in judging], settings)
    return model, judged(model, [run for run in ended if run.program in judging])


def fit_lengths(runs: Sequence[TracedRun], settings: ForestSettings) -> LengthModel:
    """Two forests on all of `runs`: of the agent's own tokens, and of the rest of its program's."""
    features = Features(
        sorted({run.prospect.workflow for run in runs}),
        sorted({run.prospect.stage for run in runs}),
        sorted({run.model for run in runs}),
        _sketch([run.prospect.user for run in runs], settings),
    )
    rows = features.rows([(run.prospect, run.model) for run in runs])
    own = fit_forest(rows, [run.own_tokens for run in runs], settings)
    return LengthModel(features, own, fit_forest(rows, [run.total_tokens for run in runs], settings))


def fit_forest(rows: Floats, targets: Sequence[float], settings: ForestSettings) -> Forest:
    """A quantile forest that keeps all targets of its leaves, as arrays."""
    forest = RandomForestQuantileRegressor(
        settings.trees,
        min_samples_leaf=settings.leaf,
        max_samples_leaf=None,
        random_state=settings.seed,
        n_jobs=1,
    )
    forest.fit(rows, np.asarray(targets, dtype=float))
    return exported(forest)


def exported(forest: RandomForestQuantileRegressor) -> Forest:
    """What the fitted forest decides by. Its leaves hold training targets by number, counted from 1; 0 is none."""
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
        np.concatenate([_moved(tree.children_left, by) for tree, by in zip(trees, offsets, strict=False)]),
        np.concatenate([_moved(tree.children_right, by) for tree, by in zip(trees, offsets, strict=False)]),
        np.concatenate([np.maximum(tree.feature, 0) for tree in trees]).astype(np.int32),
        np.concatenate([tree.threshold for tree in trees]),
        np.concatenate([[0], ends[:-1]]).astype(np.int32),
        ends,
        np.concatenate(leaves),
    )


def _moved(children: NDArray[np.int64], by: int) -> Places:
    """A tree's links, counted from the forest's first node on."""
    return np.where(children == LEAF, LEAF, children + by).astype(np.int32)


def _sketch(texts: Sequence[str], settings: ForestSettings) -> Sketch | None:
    """None where no texts were recorded."""
    if not any(texts):
        return None
    vectors = TfidfVectorizer(ngram_range=(1, 2), max_features=settings.terms)
    try:
        weighed = vectors.fit_transform(texts)
    except ValueError:  # no word of two letters in any of them
        return None
    components = min(settings.components, weighed.shape[1] - 1)
    if components < 1:
        return None
    projection = TruncatedSVD(components, random_state=settings.seed).fit(weighed).components_.T
    vocabulary = {term: int(row) for term, row in vectors.vocabulary_.items()}
    return Sketch(vocabulary, vectors.idf_, projection)


def judged(model: LengthModel, runs: Sequence[TracedRun]) -> list[LengthScore]:
    """Per model, how `runs` are ordered by the predictor, by arrival, and by the prompt's length."""
    by_model = {name: [run for run in runs if run.model == name] for name in model.features.models}
    return [_score(model, name, found) for name, found in by_model.items() if found]


def _score(model: LengthModel, name: str, runs: Sequence[TracedRun]) -> LengthScore:
    told = [answer["total_tokens"][name] for answer in model.answers([run.prospect for run in runs])]
    true = [float(run.total_tokens) for run in runs]
    return LengthScore(
        name,
        len(runs),
        kendall_distance(told, true),
        kendall_distance([run.arrived_s for run in runs], true),
        kendall_distance([float(run.prompt_tokens) for run in runs], true),
        float(np.median(np.abs(np.array(told) - np.array(true)))),
    )
