"""What a topology with steps decides by: rules in order, the first that holds is taken (CoServe, section 2.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from shell_router.topology.patterns import found_in

START, END = "start", "end"
"""Where a request begins, and where it has its answer: no step may have these names."""

Subject = Literal["request", "output"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Tells the class of a text: that of the example most like it, if they are as alike as `min_similarity`.

    `examples` are texts by class; likeness is the cosine of the texts' embeddings.
    """

    id: str
    examples: Mapping[str, tuple[str, ...]]
    min_similarity: float = -1.0


@dataclass(frozen=True, slots=True)
class Classed:
    """What a classifier says: the class, empty where no example is like enough, and the nearest one's similarity."""

    name: str
    similarity: float


@dataclass(frozen=True, slots=True)
class When:
    """What has to hold, all of it.

    `labels` are the values that the request's labels may have. `matches` is a pattern that the text named by `of` holds
    somewhere. `classifier` tells the class of that text, which has to be one of `classes`. `confidence_below` is
    compared with the geometric mean token probability of the output.
    """

    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    matches: str = ""
    classifier: str = ""
    classes: tuple[str, ...] = ()
    confidence_below: float | None = None
    of: Subject = "request"

    def __str__(self) -> str:
        said = [f"label {key} is {_either(values)}" for key, values in self.labels.items()]
        said += [f"{self.of} matches '{self.matches}'"] if self.matches else []
        said += [f"{self.classifier} of the {self.of} is {_either(self.classes)}"] if self.classifier else []
        said += [] if self.confidence_below is None else [f"confidence below {self.confidence_below:g}"]
        return " and ".join(said)


@dataclass(frozen=True, slots=True)
class Rule:
    """Leads to the step `go`, or to the END, when `when` holds; without it always."""

    go: str
    when: When | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules read: the request, and the output of the step that has just ended.

    `confidence` is None where nothing was decoded. `classes` holds what classifiers said of which text, None where one
    could not be asked.
    """

    labels: Mapping[str, str]
    request: str
    output: str = ""
    confidence: float | None = None
    classes: Mapping[tuple[str, Subject], Classed | None] = field(default_factory=dict)

    def text(self, of: Subject) -> str:
        """The text that a rule speaks of."""
        return self.request if of == "request" else self.output

    @property
    def characters(self) -> int:
        """Of both texts."""
        return len(self.request) + len(self.output)


@dataclass(frozen=True, slots=True)
class Choice:
    """The target that was chosen, the number of the rule among those asked, from 1, and what made it hold."""

    go: str
    rule: int
    why: str


@dataclass(frozen=True, slots=True)
class Unclassified:
    """Nothing can be chosen before this classifier has been asked about this text."""

    classifier: str
    of: Subject


def choose(rules: Sequence[Rule], facts: Facts) -> Choice | Unclassified:
    """The first of `rules` that holds. The last has no condition, so that one always does."""
    for number, rule in enumerate(rules, start=1):
        if rule.when is None:
            return Choice(rule.go, number, "otherwise" if len(rules) > 1 else "always")
        why = _why(rule.when, facts)
        if isinstance(why, Unclassified):
            return why
        if why:
            return Choice(rule.go, number, why)
    raise ValueError("no rule holds: the last one has a condition")


def _why(when: When, facts: Facts) -> str | Unclassified:
    """What makes `when` hold, empty where it does not. A classifier is asked only when all else holds."""
    said = []
    for key, values in when.labels.items():
        if facts.labels.get(key) not in values:
            return ""
        said.append(f"label {key} is {facts.labels[key]!r}")
    if when.matches:
        if not found_in(when.matches, facts.text(when.of)):
            return ""
        said.append(f"{when.of} matches '{when.matches}'")
    if when.confidence_below is not None:
        confidence = facts.confidence or 0.0  # of no tokens nobody can be sure
        if confidence >= when.confidence_below:
            return ""
        said.append(f"confidence {confidence:.3f} is below {when.confidence_below:g}")
    if when.classifier:
        if (when.classifier, when.of) not in facts.classes:
            return Unclassified(when.classifier, when.of)
        classed = facts.classes[when.classifier, when.of]
        if classed is None or classed.name not in when.classes:
            return ""
        said.append(f"{when.classifier} of the {when.of} is {classed.name!r} ({classed.similarity:.2f})")
    return " and ".join(said)


def _either(values: Sequence[str]) -> str:
    return " or ".join(map(repr, values))
