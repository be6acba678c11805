"""What is served is what scikit-learn and quantile-forest have fitted."""

import numpy as np
import pytest
from quantile_forest import RandomForestQuantileRegressor
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from shell_router.prediction.fitting import COMPONENTS, _fit_sketch, export_forest

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(300, 6)).astype(np.float32)
TARGETS = np.round(np.exp(ROWS[:, 0] + RNG.normal(size=300)) * 10)


@pytest.mark.parametrize("leaf", [1, 5, 40])
def test_medians_are_the_librarys(leaf: int) -> None:
    fitted = RandomForestQuantileRegressor(
        20, min_samples_leaf=leaf, max_samples_leaf=None, random_state=0
    )
    fitted.fit(ROWS, TARGETS)
    fresh = RNG.normal(size=(50, 6)).astype(np.float32)
    assert export_forest(fitted).medians(fresh) == pytest.approx(
        list(fitted.predict(fresh, quantiles=0.5))
    )


TEXTS = [
    "Tom has 12 pens and buys more pens",
    "Amy has apples",
    "Kim has 45 stamps. Amy has 8 times as many.",
] * 3


def test_sketches_are_scikit_learns() -> None:
    sketch = _fit_sketch(TEXTS, 0)
    assert sketch is not None
    vectors = TfidfVectorizer(ngram_range=(1, 2), max_features=2000)
    projected = TruncatedSVD(COMPONENTS, random_state=0).fit(vectors.fit_transform(TEXTS))
    fresh = ["Amy buys 12 stamps; Kim has apples", "Unheard words alone", ""]
    assert sketch.of(fresh) == pytest.approx(projected.transform(vectors.transform(fresh)))


def test_texts_without_words_have_no_sketch() -> None:
    assert _fit_sketch(["", ""], 0) is None
    assert _fit_sketch(["1 2 3", "?"], 0) is None
