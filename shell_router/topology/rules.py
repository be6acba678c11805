"""Rules between steps: the first that holds decides what follows (CoServe, section 2.1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import re2


def pattern_error(pattern: str) -> str:
    """Why `pattern` is not a regular expression of RE2's, empty if it is one."""
    try:
        _compiled(pattern)
    except re2.error as error:
        if error.args:
            said = error.args[0]
        else:
            said = "cannot be read"
        if isinstance(said, bytes):
            return said.decode()
        return str(said)
    return ""


def found_in(pattern: str, text: str) -> bool:
    """Whether `text` holds the pattern somewhere."""
    return _compiled(pattern).search(text) is not None


@lru_cache(maxsize=256)  # clients' topologies have patterns, too
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False  # the check of the file reports them
    options.max_mem = 2**20  # bytes, of which `[\pL\pN]{50}` fits in and takes 50 ms to compile
    return re2.compile(pattern, options)


START = "start"
END = "end"
"""Where a request begins, and where it has its answer: no step may have these names."""

Subject = Literal["request", "output"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Classifies a text as its most similar example, if their similarity reaches `min_similarity`.

    `examples` are texts by class; the similarity is the cosine of the texts' embeddings.
    """

    id: str
    examples: Mapping[str, tuple[str, ...]]
    min_similarity: float = -1.0


@dataclass(frozen=True, slots=True)
class Classed:
    """What a classifier says: the class, empty where no example is like enough, and the nearest
    one's similarity.
    """

    name: str
    similarity: float


@dataclass(frozen=True, slots=True)
class When:
    """What has to hold, all of it.

    `labels` are the values that the request's labels may have. `matches` is a pattern that the text
    named by `of` holds somewhere. `classifier` must put that text into one of `classes`.
    `confidence_below` is compared with the geometric mean token probability of the output,
    `scores_below` per model with the predicted chance that it would answer the request rightly.
    """

    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    matches: str = ""
    classifier: str = ""
    classes: tuple[str, ...] = ()
    confidence_below: float | None = None
    scores_below: Mapping[str, float] = field(default_factory=dict)
    of: Subject = "request"

    def __str__(self) -> str:
        said = [f"label {key} is {_either(values)}" for key, values in self.labels.items()]
        said += [f"{self.of} matches '{self.matches}'"] if self.matches else []
        said += (
            [f"{self.classifier} of the {self.of} is {_either(self.classes)}"]
            if self.classifier
            else []
        )
        said += (
            [] if self.confidence_below is None else [f"confidence below {self.confidence_below:g}"]
        )
        said += [f"score of {model} below {limit:g}" for model, limit in self.scores_below.items()]
        return " and ".join(said)


@dataclass(frozen=True, slots=True)
class Rule:
    """Leads to the step `go`, or to the END, when `when` holds; without it always."""

    go: str
    when: When | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules read: the request, and the output of the step that has just ended.

    `confidence` is None where nothing was decoded. `classes` holds what classifiers said of which
    text, None where one could not be asked. `scores` are predicted chances by model, None before
    they are predicted; models may be missing.
    """

    labels: Mapping[str, str]
    request: str
    output: str = ""
    confidence: float | None = None
    classes: Mapping[tuple[str, Subject], Classed | None] = field(default_factory=dict)
    scores: Mapping[str, float] | None = None

    def text(self, of: Subject) -> str:
        """The text that a rule speaks of."""
        if of == "request":
            return self.request
        return self.output


@dataclass(frozen=True, slots=True)
class Transition:
    """The target that was chosen, the number of the rule among those asked, from 1, and what made
    it hold.
    """

    go: str
    rule: int
    why: str


@dataclass(frozen=True, slots=True)
class Unclassified:
    """Nothing can be chosen before this classifier has been asked about this text."""

    classifier: str
    of: Subject


@dataclass(frozen=True, slots=True)
class Unscored:
    """Nothing can be chosen before scores are predicted."""


Missing = Unclassified | Unscored


def choose(rules: Sequence[Rule], facts: Facts) -> Transition | Unclassified | Unscored:
    """The first of `rules` that holds. The last has no condition, so that one always does."""
    for number, rule in enumerate(rules, start=1):
        if rule.when is None:
            return Transition(rule.go, number, "otherwise" if len(rules) > 1 else "always")
        why = _why(rule.when, facts)
        if isinstance(why, Missing):
            return why
        if why is not None:
            return Transition(rule.go, number, why)
    raise ValueError("no rule holds: the last one has a condition")


def _why(when: When, facts: Facts) -> str | Missing | None:
    """What makes `when` hold; None where it does not."""
    said: list[str] = []
    for part in _parts(when, facts):
        if not isinstance(part, str):
            return part
        said.append(part)
    return " and ".join(said)


def _parts(when: When, facts: Facts) -> Iterator[str | Missing | None]:
    """What makes each part of `when` hold, None for one that does not. Predictors and classifiers
    are asked last.
    """
    for key, values in when.labels.items():
        label = facts.labels.get(key)
        yield f"label {key} is {label!r}" if label in values else None
    if when.matches:
        yield (
            f"{when.of} matches '{when.matches}'"
            if found_in(when.matches, facts.text(when.of))
            else None
        )
    if (limit := when.confidence_below) is not None:
        confidence = facts.confidence or 0.0  # no tokens: no confidence
        yield f"confidence {confidence:.3f} is below {limit:g}" if confidence < limit else None
    if when.scores_below and facts.scores is None:
        yield Unscored()
    for model, limit in when.scores_below.items():
        score = (facts.scores or {}).get(model, limit)
        yield f"score of {model}, {score:.3f}, is below {limit:g}" if score < limit else None
    if name := when.classifier:
        if (name, when.of) not in facts.classes:
            yield Unclassified(name, when.of)
        classed = facts.classes.get((name, when.of))
        if classed is None or classed.name not in when.classes:
            yield None
        else:
            yield f"{name} of the {when.of} is {classed.name!r} ({classed.similarity:.2f})"


def _either(values: Sequence[str]) -> str:
    return " or ".join(map(repr, values))
