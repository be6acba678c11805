"""Rules between steps: the first that holds decides what follows (CoServe, section 2.1)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import re2

from shell_router.errors import InvalidRequest

MOST_STEPS = 2**30
"""The most steps of one choice's patterns, each its compiled size times its text's characters. RE2
takes 10**8 steps a second at worst.
"""


def pattern_error(pattern: str) -> str:
    """Return why RE2 refuses `pattern`; empty if it does not."""
    try:
        _compile(pattern)
    except re2.error as error:
        reason = error.args[0] if error.args else "cannot be read"
        return reason.decode() if isinstance(reason, bytes) else str(reason)
    return ""


def has_match(pattern: str, text: str) -> bool:
    """Return whether the pattern matches anywhere in `text`."""
    return _compile(pattern).search(text) is not None


@lru_cache(maxsize=256)  # clients' topologies have patterns, too
def _compile(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False  # the check of the topology reports them
    options.max_mem = 2**20  # bytes; `[\pL\pN]{50}` fits, and takes 50 ms to compile
    return re2.compile(pattern, options)


START = "start"
END = "end"
"""The beginning and the end of a request; no step may have these names."""

Subject = Literal["request", "output"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Gives a text the class of its most similar example, if that reaches `min_similarity`.

    `examples` are texts by class; the similarity is the cosine of the texts' embeddings.
    """

    id: str
    examples: Mapping[str, tuple[str, ...]]
    min_similarity: float = -1.0


@dataclass(frozen=True, slots=True)
class Classed:
    """A classifier's result; `name` is empty if no example is similar enough."""

    name: str
    similarity: float


@dataclass(frozen=True, slots=True)
class When:
    """A condition; all of its parts must hold.

    Attributes:
        labels: The values that labels of the request may have.
        matches: A pattern that matches somewhere in the text named by `of`.
        classifier: The name of a classifier that must put that text into one of `classes`.
        confidence_below: The output's geometric mean token probability is lower.
        scores_below: A model's predicted chance of answering the request correctly is lower.
        failed: The step has failed. Then only such rules are read, and otherwise only the others.
    """

    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    matches: str = ""
    classifier: str = ""
    classes: tuple[str, ...] = ()
    confidence_below: float | None = None
    scores_below: Mapping[str, float] = field(default_factory=dict)
    of: Subject = "request"
    failed: bool = False

    def __str__(self) -> str:
        parts = [f"label {key} is {_join(values)}" for key, values in self.labels.items()]
        if self.matches:
            parts.append(f"{self.of} matches '{self.matches}'")
        if self.classifier:
            parts.append(f"{self.classifier} of the {self.of} is {_join(self.classes)}")
        if self.confidence_below is not None:
            parts.append(f"confidence below {self.confidence_below:g}")
        if self.failed:
            parts.append("it failed")
        parts += [f"score of {model} below {limit:g}" for model, limit in self.scores_below.items()]
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Rule:
    """Leads to the step `go`, or to END, if `when` holds; without `when` it always does."""

    go: str
    when: When | None = None

    @property
    def is_for_failure(self) -> bool:
        """Whether it is read if the step has failed."""
        return self.when is not None and self.when.failed


@dataclass(frozen=True, slots=True)
class Facts:
    """The input of rules: the request, and the output of the step that has just ended.

    Attributes:
        confidence: The output's geometric mean token probability; None without tokens.
        classes: The results of classifiers, by classifier and text; a result is None if the
            classifier failed.
        scores: The predicted chances, by model; models may be missing. None if not predicted yet.
        error: Why the step failed; empty if it did not.
    """

    labels: Mapping[str, str]
    request: str
    output: str = ""
    confidence: float | None = None
    classes: Mapping[tuple[str, Subject], Classed | None] = field(default_factory=dict)
    scores: Mapping[str, float] | None = None
    error: str = ""

    def text(self, of: Subject) -> str:
        """Return the text that a condition reads."""
        if of == "request":
            return self.request
        return self.output


@dataclass(frozen=True, slots=True)
class Transition:
    """A chosen target, the number of its rule, from 1, and the reason why the rule holds."""

    go: str
    rule: int
    why: str


@dataclass(frozen=True, slots=True)
class Unclassified:
    """No rule can be chosen before this classifier has classified this text."""

    classifier: str
    of: Subject


@dataclass(frozen=True, slots=True)
class Unscored:
    """No rule can be chosen before scores are predicted."""


Missing = Unclassified | Unscored


def choose(
    rules: Sequence[Rule], facts: Facts, is_left: Callable[[], bool] = lambda: False
) -> Transition | Unclassified | Unscored:
    """Choose the first rule that holds. The last one that is not for failure has no condition.

    Raises:
        InvalidRequest: The patterns would take too many steps.
        CancelledError: `is_left` before a rule: no caller waits for the choice any more.
    """
    _require_few_steps(rules, facts)
    for number, rule in enumerate(rules, start=1):
        if is_left():
            raise CancelledError
        if bool(facts.error) != rule.is_for_failure:
            continue
        if rule.when is None:
            return Transition(rule.go, number, "otherwise" if len(rules) > 1 else "always")
        reason = _evaluate(rule.when, facts)
        if isinstance(reason, Missing):
            return reason
        if reason is not None:
            return Transition(rule.go, number, reason)
    raise ValueError("no rule holds: the last one has a condition")


def _require_few_steps(rules: Sequence[Rule], facts: Facts) -> None:
    whens = [rule.when for rule in rules if rule.when is not None and rule.when.matches]
    steps = sum(_compile(when.matches).programsize * len(facts.text(when.of)) for when in whens)
    if steps > MOST_STEPS:
        raise InvalidRequest(
            f"The patterns of the rules take {steps} steps over the text, of at most {MOST_STEPS}.",
            remedy="Shorten the text, or the patterns: nested repetitions multiply.",
        )


def _evaluate(when: When, facts: Facts) -> str | Missing | None:
    """Return the reason why `when` holds; None if it does not."""
    reasons: list[str] = []
    for reason in _evaluate_parts(when, facts):
        if not isinstance(reason, str):
            return reason
        reasons.append(reason)
    return " and ".join(reasons)


def _evaluate_parts(when: When, facts: Facts) -> Iterator[str | Missing | None]:
    """Yield the reason why each part of `when` holds, None for a part that does not.

    Parts that need a predictor or a classifier come last.
    """
    if when.failed:
        yield f"it failed: {facts.error}"
    for key, values in when.labels.items():
        label = facts.labels.get(key)
        yield f"label {key} is {label!r}" if label in values else None
    if when.matches:
        yield (
            f"{when.of} matches '{when.matches}'"
            if has_match(when.matches, facts.text(when.of))
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


def _join(values: Sequence[str]) -> str:
    return " or ".join(map(repr, values))
