"""What is wrong with the rules between steps."""

from collections.abc import Iterator

from shell_router.topology.document import Path, Problem
from shell_router.topology.grammar import spelled, suggestion
from shell_router.topology.layered import Values
from shell_router.topology.patterns import pattern_error
from shell_router.topology.rules import END, START


def rules_of(file: Values) -> Iterator[tuple[str, Path, Values]]:
    """Every rule as the file's form allows: START or the step that is asked, where it stands, and what it says.

    A bare step id is a rule without a condition.
    """
    lists: list[tuple[str, Path]] = [(START, ("start",))]
    lists += [(step, ("steps", step, "then")) for step, said in file["steps"].items() if "then" in said]
    for place, at in lists:
        said = file["start"] if place == START else file["steps"][place]["then"]
        if isinstance(said, str):
            yield place, at, {"go": said}
        else:
            yield from ((place, (*at, position), rule) for position, rule in enumerate(said))


def rule_problems(file: Values) -> Iterator[Problem]:
    """Targets, classifiers and classes that do not exist; conditions that cannot be asked; rules never reached."""
    targets = [*file["steps"], END]
    always: dict[str, Path] = {}
    used: set[str] = set()
    for place, at, rule in rules_of(file):
        if place in always:
            wrong = f"{spelled(at)} is never asked: {spelled(always[place])} always holds."
            yield Problem(at, wrong, "Put the rule without 'when' last.")
        if rule["go"] not in targets or (place == START and rule["go"] == END):
            known = list(file["steps"]) if place == START else targets
            where = (*at, "go") if isinstance(at[-1], int) else at
            yield Problem(where, f"'{rule['go']}' is not a step.", suggestion(rule["go"], known))
        if "when" in rule:
            yield from _when_problems(rule["when"], (*at, "when"), at_start=place == START)
            yield from _class_problems(rule["when"], (*at, "when"), file.get("classifiers", {}))
            used.add(rule["when"].get("classifier", ""))
        else:
            always.setdefault(place, at)
    if START not in always:
        wrong = "A request may meet no rule of 'start'."
        yield Problem(("start",), wrong, "End it with a rule without 'when', such as {go: ...}.")
    for classifier in file.get("classifiers", {}):
        if classifier not in used:
            at_it = ("classifiers", classifier)
            yield Problem(at_it, f"No rule asks the classifier '{classifier}'.", "Remove it, or ask it in a rule.")


def subject_of(when: Values, *, at_start: bool) -> str:
    """Which text a condition speaks of."""
    return str(when.get("of", "request" if at_start else "output"))


def _when_problems(when: Values, at: Path, *, at_start: bool) -> Iterator[Problem]:
    if not when.keys() - {"of"}:
        yield Problem(at, f"{spelled(at)} says nothing that could hold.", "Say it, or leave 'when' out.")
    elif "of" in when and not {"matches", "classifier"} & when.keys():
        yield Problem((*at, "of"), f"{spelled(at)} reads no text.", "Remove 'of', or add 'matches' or 'classifier'.")
    if at_start and ("confidence_below" in when or subject_of(when, at_start=True) == "output"):
        key = "of" if "of" in when else "confidence_below"
        yield Problem((*at, key), "At the start there is no output yet.", "Ask about the request.")
    if error := pattern_error(when.get("matches", "")):
        remedy = "Patterns are RE2's: no look-around, no back-references."
        yield Problem((*at, "matches"), f"{spelled((*at, 'matches'))} is no pattern: {error}.", remedy)


def _class_problems(when: Values, at: Path, classifiers: Values) -> Iterator[Problem]:
    name = when.get("classifier")
    if (name is None) != ("is" not in when):
        wrong = f"{spelled(at)} has only one of 'classifier' and 'is'."
        yield Problem(at, wrong, "Write both: which classifier, and which class.")
        return
    if name is None:
        return
    if name not in classifiers:
        yield Problem((*at, "classifier"), f"Unknown classifier '{name}'.", suggestion(name, list(classifiers)))
        return
    classes = list(classifiers[name]["examples"])
    named = when["is"] if isinstance(when["is"], list) else [when["is"]]
    for one in named:
        if one not in classes:
            wrong = f"The classifier '{name}' has no class '{one}'."
            yield Problem((*at, "is"), wrong, suggestion(one, classes))
