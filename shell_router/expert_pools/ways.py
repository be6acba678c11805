"""Which way requests take through a topology's steps, as far as it is known beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from shell_router.errors import ConfigError, DataError
from shell_router.topology import Conditional, Graph
from shell_router.topology.rules import START, Choice, Facts, Rule, When, choose

Chances = Mapping[tuple[str, str], Mapping[str, float]]
"""Per topology and step, or "start", how often each step, or "end", follows; each sums up to 1."""

_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as far as it is known, standing for `weight` of them: what it asks, its labels, its question.

    None stands for labels or a question that nobody knows.
    """

    topology: str
    labels: Mapping[str, str] | None = field(default_factory=dict)
    question: str | None = None
    weight: float = 1.0


def read_sample(text: str, *, source: str) -> list[Asked]:
    """A request per line of JSON: `model`, the topology's name, and as far as rules read them `metadata`, `question`.

    Raises DataError, which begins with `source:line:`.
    """
    lines = enumerate(text.split("\n"), start=1)  # `splitlines` would also split at what JSON's texts may hold
    return [_asked(line, f"{source}:{number}") for number, line in lines if line.strip()]


def require_places(graphs: Mapping[str, Graph], chances: Chances) -> None:
    """Raise ConfigError for chances of what follows on a place that none of the topologies has."""
    known = [
        (name, place) for name, one in graphs.items() if isinstance(one, Conditional) for place in (START, *one.steps)
    ]
    for topology, place in chances:
        if (topology, place) not in known:
            raise ConfigError(
                f"There are chances of what follows on {topology}/{place}, which is nowhere.",
                remedy=f"Known: {', '.join(map('/'.join, known)) or 'none'}.",
            )


def ways(topology: Conditional, place: str, asked: Asked, chances: Chances) -> Mapping[str, float]:
    """How probably each target follows on `place`, a step or the start. Raises ConfigError where nobody can tell."""
    rules = topology.start if place == START else topology.steps[place].then
    given = chances.get((topology.name, place))
    if given is not None:
        return _checked(given, rules, f"{topology.name}/{place}")
    if all(rule.go == rules[0].go for rule in rules):
        return {rules[0].go: 1.0}
    told = [rule for rule in rules if not _known_not_to_hold(rule.when, asked)]
    if told[0].when is None or _is_known(told[0].when, asked):
        return {told[0].go: 1.0}
    raise ConfigError(
        f"{topology.name}: how often {place!r} leads to {told[0].go!r} is not known: {told[0].when}.",
        remedy=f"Give the chances of what follows on {topology.name}/{place}.",
    )


def _known_not_to_hold(when: When | None, asked: Asked) -> bool:
    """Whether what the request tells is enough to rule it out."""
    if when is None:
        return False
    labels = {} if asked.labels is None else when.labels
    part = When(labels=labels, matches=when.matches if _reads_question(when, asked) else "")
    facts = Facts(asked.labels or {}, asked.question or "")
    found = choose((Rule("holds", part), Rule("not")), facts) if part.labels or part.matches else None
    return isinstance(found, Choice) and found.go == "not"


def _is_known(when: When, asked: Asked) -> bool:
    """Whether the request tells all that is asked."""
    if when.confidence_below is not None or when.classifier or when.scores_below:
        return False
    if when.labels and asked.labels is None:
        return False
    return not when.matches or _reads_question(when, asked)


def _reads_question(when: When, asked: Asked) -> bool:
    return bool(when.matches) and when.of == "request" and asked.question is not None


def _checked(given: Mapping[str, float], rules: Sequence[Rule], where: str) -> Mapping[str, float]:
    targets = {rule.go for rule in rules}
    if unknown := sorted(given.keys() - targets):
        raise ConfigError(
            f"The chances of {where} name {', '.join(unknown)}.", remedy=f"It leads to {', '.join(sorted(targets))}."
        )
    if any(not 0 <= chance <= 1 for chance in given.values()) or abs(sum(given.values()) - 1) > _CLOSE:
        raise ConfigError(f"The chances of {where} are {dict(given)}.", remedy="Give shares that sum up to 1.")
    return given


def _asked(line: str, where: str) -> Asked:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: The line is not JSON: {error}.", remedy="Write one object per line.") from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), str):
        raise DataError(f"{where}: The line names no topology.", remedy='Write an object with a "model".')
    labels, question = found.get("metadata", {}), found.get("question")
    if not isinstance(labels, dict) or not all(isinstance(one, str) for one in labels.values()):
        raise DataError(f"{where}: metadata is not an object of texts.", remedy="Write labels and their values.")
    if question is not None and not isinstance(question, str):
        raise DataError(f"{where}: question is not a text.", remedy="Write the text of the last user message.")
    return Asked(found["model"], labels, question)
