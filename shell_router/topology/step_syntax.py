"""The keys of steps and of the rules between them, their forms and their meaning."""

from shell_router.topology.blocks import Block, Either, ListOf, MappingOf
from shell_router.topology.grammar import Choice, Form, Number, Text
from shell_router.topology.names import name_form
from shell_router.topology.rules import SUBJECTS

MAX_STEPS = 100
MAX_RULES = 100


def _one_or_several(about: str, noun: str) -> Either:
    return Either(about, (Text(about), ListOf(about, Text(noun), at_least=1)))


WHEN = Block(
    "What has to hold, all of it.",
    {
        "label": MappingOf(
            "Values that labels of the request must have; of several values one.",
            Text("Label, as requests name it.", r".+", "a label"),
            _one_or_several("A value, or several of which one will do.", "Value."),
        ),
        "matches": Text("Regular expression (RE2) that the text holds somewhere.", r".+", "a regular expression"),
        "classifier": name_form("What tells the class of the text; `is` names the classes."),
        "is": _one_or_several("The class that the text must have, or several of which one will do.", "Class."),
        "confidence_below": Number(
            "Holds when the step's output has a lower geometric mean token probability.", above=0, at_most=1
        ),
        "score_below": MappingOf(
            "Holds when the deployment's trained router gives each of these models a lower chance of being right.",
            Text("Model alias.", r".*\S.*", "a model alias"),
            Number("The chance.", above=0, at_most=1),
        ),
        "of": Choice("Which text is meant; the request at the start, else the step's output.", SUBJECTS),
    },
    name="when",
)

RULE = Block(
    "Leads to a step, or to the end, when something holds; without `when` always.",
    {"when": WHEN, "go": name_form("A step's id, or `end`.")},
    required=("go",),
    name="rule",
)


def _rules(about: str) -> Either:
    rules = ListOf(about, RULE, at_least=1, at_most=MAX_RULES, noun="a list of rules")
    return Either(about, (name_form("The step that always follows, or `end`."), rules))


START_RULES = _rules("Which step is first: its id, or rules, of which the first that holds is taken.")

CLASSIFIER = Block(
    "Tells the class of a text by the example most like it.",
    {
        "examples": MappingOf(
            "Texts by class.",
            Text("Class.", r".*\S.*", "a class"),
            ListOf("Texts of this class.", Text("An example.", r".*\S.*", "a text"), at_least=1, at_most=1000),
        ),
        "min_similarity": Number(
            "Least cosine similarity to the nearest example; a text that is less like any has no class.",
            at_least=-1,
            at_most=1,
        ),
    },
    required=("examples",),
    name="classifier",
)

STEP_FIELDS: dict[str, Form] = {
    "topology": name_form("A topology's name: the step asks all of it."),
    "then": _rules("What follows: a step's id, or rules, of which the first that holds is taken; by default `end`."),
}
"""What a step has beside what an agent has."""
