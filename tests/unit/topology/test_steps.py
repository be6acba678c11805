"""Topologies with steps: what a file says, and what is refused."""

from pathlib import Path

import pytest

from shell_router.errors import TopologyError
from shell_router.topology import Catalog, Conditional, Topology, load_with_others, parse_topology
from shell_router.topology.draw import draw
from shell_router.topology.rules import Rule, When
from tests.fakes.topologies import parse_steps

TREE = parse_topology(
    "name: tree\ntree: {shape: [2, 1], models: [m]}\nearly_exit: on\n", source="tree.yaml"
)

STEPS = """name: triage
description: who is asked
start:
  - {when: {label: {kind: [hard, new]}, matches: '^Why'}, go: whole}
  - {when: {classifier: subject, is: sums}, go: quick}
  - {go: quick}
steps:
  quick:
    model: small
    then:
      - {when: {matches: unsure}, go: careful}
      - {when: {confidence_below: 0.5, classifier: subject, is: [sums], of: request}, go: whole}
  careful: {model: [large, medium], precursors: [quick], then: end}
  whole: {topology: tree}
classifiers:
  subject: {examples: {sums: [one and one], rest: [a poem, a tale]}, min_similarity: 0.1}
defaults: {sampling: {max_new_tokens: 8}}
"""


def steps(text: str = STEPS) -> Conditional:
    return parse_steps(text, source="f.yaml", topologies={"tree": TREE})


def test_rules_are_read_in_their_order_and_end_with_one_that_always_holds() -> None:
    read = steps()
    assert read.start == (
        Rule("whole", When(labels={"kind": ("hard", "new")}, matches="^Why")),
        Rule("quick", When(classifier="subject", classes=("sums",))),
        Rule("quick"),
    )
    assert read.steps["quick"].then == (
        Rule("careful", When(matches="unsure", of="output")),
        Rule("whole", When(confidence_below=0.5, classifier="subject", classes=("sums",))),
        Rule("end"),
    )
    assert read.classifiers["subject"].examples == {
        "sums": ("one and one",),
        "rest": ("a poem", "a tale"),
    }


def test_a_step_of_an_agent_is_a_topology_of_one_and_one_of_a_topology_holds_all_of_it() -> None:
    read = steps()
    quick, whole = read.steps["quick"].topology, read.steps["whole"].topology
    assert list(quick.agents) == ["quick"] and quick.agents["quick"].sampling == {
        "max_new_tokens": 8
    }
    assert list(whole.agents) == ["whole/proposer-1", "whole/proposer-2", "whole/root"]
    assert whole.root.precursors == ("whole/proposer-1", "whole/proposer-2")
    assert [cluster.agents for cluster in whole.clusters] == [
        ("whole/proposer-1", "whole/proposer-2")
    ]
    assert read.steps["careful"].topology.root.candidates == ("large", "medium")


def test_only_roots_of_steps_that_nothing_follows_answer_as_they_write() -> None:
    assert steps().answering == {"careful", "whole/root"}
    assert "quick" in steps().may_answer and not steps().steps["quick"].is_last


def test_steps_stand_after_those_that_lead_to_them_and_wait_for_them() -> None:
    read = steps()
    assert next(iter(read.steps)) == "quick"
    assert read.waits_for["careful"] == ("quick",) == read.waits_for["whole/proposer-1"]
    assert read.waits_for["whole/root"] == ("whole/proposer-1", "whole/proposer-2")


def test_a_bare_id_is_a_rule_without_condition() -> None:
    read = parse_steps("start: a\nsteps: {a: {model: m, then: b}, b: {model: m}}", source="f.yaml")
    assert read.start == (Rule("a"),) and read.steps["a"].then == (Rule("b"),)
    assert "a" not in read.may_answer and read.steps["b"].is_last


GOOD = "start: a\nsteps:\n  a: {model: m}\n"
WRONG = {
    "no start": ("steps:\n  a: {model: m}\n", 1, "No step is named as the first"),
    "start without steps": (
        "start: a\ntree: {shape: [2, 1], models: [m]}\n",
        1,
        "'start' goes with 'steps'",
    ),
    "classifiers without steps": (
        "tree: {shape: [2, 1], models: [m]}\nclassifiers: {c: {examples: {x: [y]}}}\n",
        2,
        "'classifiers' goes with 'steps'",
    ),
    "steps and a tree": (GOOD + "tree: {shape: [2, 1], models: [m]}\n", 2, "described twice"),
    "clusters": (GOOD + "clusters: {x: {agents: [a]}}\n", 4, "'clusters' does not go with 'steps'"),
    "reserve": (GOOD + "root_reserve_s: 5\n", 4, "'root_reserve_s' does not go with 'steps'"),
    "prefill": (GOOD + "prefill: {incremental: on}\n", 4, "'prefill' does not go with 'steps'"),
    "a default that does not hold": (
        GOOD + "defaults: {on_failure: drop}\n",
        4,
        "A step that fails fails its",
    ),
    "a step that may be dropped": (
        "start: a\nsteps:\n  a: {model: m, on_failure: drop}\n",
        3,
        "'drop' is not a step",
    ),
    "a reserved name": (GOOD + "  end: {model: m}\n", 4, "named 'end', a reserved name"),
    "neither model nor topology": (
        "start: a\nsteps:\n  a: {}\n",
        3,
        "neither a model nor a topology",
    ),
    "unknown model": ("start: a\nsteps:\n  a: {model: q}\n", 3, "Unknown model 'q'"),
    "a model twice": ("start: a\nsteps:\n  a: {model: [m, m]}\n", 3, "names 'm' twice"),
    "unknown topology": (
        "start: a\nsteps:\n  a: {topology: tre}\n",
        3,
        "Unknown topology 'tre'.*'tree'",
    ),
    "both": (
        "start: a\nsteps:\n  a:\n    topology: tree\n    model: m\n",
        5,
        "asks a topology, so it cannot have 'model'",
    ),
    "a slot without a precursor": (
        "start: a\nsteps:\n  a: {model: m, prompt: {slot: '{output}'}}\n",
        3,
        "has a slot, but no precursor",
    ),
    "unknown start": ("start: b\nsteps:\n  abc: {model: m}\n", 1, "'b' is not a step.*Known: abc"),
    "nothing but the end": ("start: end\nsteps:\n  a: {model: m}\n", 1, "'end' is not a step"),
    "unknown target": (
        "start: a\nsteps:\n  a:\n    model: m\n    then:\n      - {go: ende}\n",
        6,
        "'ende' is not a step. Did you mean 'end'",
    ),
    "unknown target without a list": (
        "start: a\nsteps:\n  a: {model: m, then: b}\n",
        3,
        "'b' is not a step",
    ),
    "a start that may lead nowhere": (
        "start:\n  - {when: {label: {x: y}}, go: a}\nsteps:\n  a: {model: m}\n",
        1,
        "may happen that no rule of 'start' holds",
    ),
    "a rule behind one that always holds": (
        "start:\n  - {go: a}\n  - {when: {label: {x: y}}, go: a}\nsteps:\n  a: {model: m}\n",
        3,
        "is never reached: start.0. always holds",
    ),
    "a rule without a target": (
        "start: [{when: {label: {x: y}}}]\nsteps:\n  a: {model: m}\n",
        1,
        "lacks 'go'",
    ),
    "an empty condition": (
        "start: [{when: {}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "has no condition",
    ),
    "a text that no condition reads": (
        "start: [{when: {label: {x: y}, of: request}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "reads no text",
    ),
    "an output at the start": (
        "start: [{when: {matches: x, of: output}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "there is no output yet",
    ),
    "confidence at the start": (
        "start: [{when: {confidence_below: 0.5}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "there is no output yet",
    ),
    "confidence that is a share of nothing": (
        "start: a\nsteps:\n  a: {model: m, then: [{when: {confidence_below: 1.5}, go: end}]}\n",
        3,
        "confidence_below must be a number above 0 and at most 1",
    ),
    "an unknown model to score": (
        (
            "start:\n  - when:\n      score_below:\n        q: 0.5\n    go: a\n  - {go: "
            "a}\nsteps:\n "
            " a: {model: m}\n"
        ),
        4,
        "Unknown model 'q'",
    ),
    "a pattern that does not close": (
        "start: [{when: {matches: '(x'}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "is not a regular expression: missing \\)",
    ),
    "a pattern that looks ahead": (
        "start: [{when: {matches: '(?=x)'}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "no look-around",
    ),
    "a label without a value": (
        "start: [{when: {label: {x: []}}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "label.x must be text or a list of 1 or more items",
    ),
    "a label with a number": (
        "start: [{when: {label: {x: 3}}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "must be text or a list of 1 or more items, not 3",
    ),
    "a classifier without a class": (
        "start: [{when: {classifier: c}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n"
        "classifiers: {c: {examples: {x: [y]}}}\n",
        1,
        "only one of 'classifier' and 'is'",
    ),
    "an unknown classifier": (
        "start: [{when: {classifier: d, is: x}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n",
        1,
        "Unknown classifier 'd'",
    ),
    "an unknown class": (
        "start: [{when: {classifier: c, is: y}, go: a}, {go: a}]\nsteps:\n  a: {model: m}\n"
        "classifiers: {c: {examples: {x: [y]}}}\n",
        1,
        "has no class 'y'",
    ),
    "an unused classifier": (
        GOOD + "classifiers: {c: {examples: {x: [y]}}}\n",
        4,
        "No rule uses the classifier 'c'",
    ),
    "a classifier without examples": (GOOD + "classifiers: {c: {}}\n", 4, "lacks 'examples'"),
    "a circle": (
        (
            "start: a\nsteps:\n  a: {model: m, then: b}\n  b: {model: m, then: [{when: {matches: "
            "x}, "
            "go: a}]}\n"
        ),
        (3, 4),
        "Steps lead in a circle: ",
    ),
    "a step that leads to itself": (
        "start: a\nsteps:\n  a: {model: m, then: a}\n",
        3,
        "in a circle: a -> a",
    ),
    "an unreachable step": (GOOD + "  b: {model: m}\n", 4, "Step 'b' is unreachable"),
    "a step behind an unreachable one": (
        GOOD + "  b: {model: m, then: c}\n  c: {model: m}\n",
        4,
        "Step 'b' is unreachable",
    ),
    "an unknown precursor": (
        "start: ab\nsteps:\n  ab: {model: m, then: c}\n  c: {model: m, precursors: [aa]}\n",
        4,
        "reads 'aa', which is not a step",
    ),
    "a precursor twice": (
        "start: a\nsteps:\n  a: {model: m, then: c}\n  c: {model: m, precursors: [a, a]}\n",
        4,
        "steps.c.precursors: it names 'a' twice",
    ),
    "an answer that may not have run": (
        "start: a\nsteps:\n  a: {model: m, then: [{when: {matches: x}, go: b}, {go: c}]}\n"
        "  b: {model: m, then: c}\n  c: {model: m, answer: b}\n",
        5,
        "answers with 'b', which need not have run before it",
    ),
    "an answer that may have failed": (
        "start: a\nsteps:\n  a: {model: m, then: b, on_failure: b}\n  b: {model: m, answer: a}\n",
        4,
        "answers with 'a', which need not have run before it",
    ),
    "a failure that leads nowhere": (
        "start: a\nsteps:\n  a: {model: m, on_failure: end}\n",
        3,
        "If step 'a' fails, there is no answer",
    ),
    "tools of a step": (
        "start: a\nsteps:\n  a: {model: m, tools: on}\n",
        3,
        "Unknown key 'tools' in steps.a",
    ),
    "tools below the root of a step's topology": (
        "start: a\nsteps:\n  a: {topology: calling}\n",
        2,
        "Below the root a/proposer-1, a/proposer-2 may call tools, .*with steps",
    ),
    "a precursor that runs later": (
        "start: a\nsteps:\n  a: {model: m, then: c, precursors: [c]}\n  c: {model: m}\n",
        3,
        "reads 'c', which never runs before it",
    ),
}


TOPOLOGIES = {
    "tree": TREE,
    "calling": parse_topology(
        "tree: {shape: [2, 1], models: [m], proposer: {tools: on}}", source="calling.yaml"
    ),
}


@pytest.mark.parametrize(("text", "line", "message"), WRONG.values(), ids=WRONG.keys())
def test_problems_have_their_line_and_a_remedy(
    text: str, line: int | tuple[int, ...], message: str
) -> None:
    with pytest.raises(TopologyError, match=message) as refused:
        parse_steps(text, source="f.yaml", topologies=TOPOLOGIES, models=("m",))
    lines = (line,) if isinstance(line, int) else line
    assert str(refused.value).startswith(tuple(f"f.yaml:{number}: " for number in lines))


def test_who_runs_agents_alone_refuses_steps_by_line() -> None:
    with pytest.raises(
        TopologyError, match=r"f\.yaml:3: A topology with steps cannot be used here"
    ):
        parse_topology("name: x\nstart: a\nsteps:\n  a: {model: m}\n", source="f.yaml")


def files(folder: Path, **texts: str) -> list[Path]:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return [folder / f"{name}.yaml" for name in texts]


TREE_FILE = "name: tree\ntree: {shape: [2, 1], models: [m]}\n"
ASKS_TREE = "start: a\nsteps:\n  a: {topology: tree}\n"


def test_steps_name_topologies_of_other_files_whatever_their_order(tmp_path: Path) -> None:
    read = (
        Catalog(None)
        .of_files(files(tmp_path, first=ASKS_TREE, second=TREE_FILE))
        .graphs_without("")
    )
    assert list(read) == ["first", "tree"]
    assert isinstance(read["first"], Conditional) and isinstance(read["tree"], Topology)


def test_a_step_may_not_ask_a_topology_that_has_steps(tmp_path: Path) -> None:
    with pytest.raises(
        TopologyError, match=r"second\.yaml:3: The topology 'first' has steps itself"
    ):
        Catalog(None).of_files(
            files(tmp_path, first=GOOD, second="start: a\nsteps:\n  a: {topology: first}\n")
        )


def test_a_topology_whose_own_file_is_wrong_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(TopologyError) as refused:
        Catalog(None).of_files(files(tmp_path, first=ASKS_TREE, second=TREE_FILE + "prefil: {}\n"))
    assert "second.yaml:3: Unknown key" in str(refused.value) and "Unknown topology" not in str(
        refused.value
    )


def test_one_file_is_read_with_those_in_its_folder_that_its_steps_name(tmp_path: Path) -> None:
    first, _, _ = files(tmp_path, first=ASKS_TREE, second=TREE_FILE, broken="tree: 3\n")
    assert list(load_with_others([first])) == [first]
    (lost,) = files(tmp_path, lost="start: a\nsteps:\n  a: {topology: tre}\n")
    with pytest.raises(
        TopologyError, match=r"lost\.yaml:3: Unknown topology 'tre'\. Did you mean 'tree'"
    ):
        load_with_others([lost])


def test_the_terminal_drawing_shows_steps_and_the_rules_between_them() -> None:
    assert draw(steps()) == (
        "triage: 3 steps, 5 agents\n"
        "who is asked\n"
        "\n"
        "start\n"
        "├─ label kind is 'hard' or 'new' and request matches '^Why' -> whole\n"
        "├─ subject of the request is 'sums' -> quick\n"
        "└─ otherwise -> quick\n"
        "quick [small]\n"
        "├─ output matches 'unsure' -> careful\n"
        "├─ subject of the request is 'sums' and confidence below 0.5 -> whole\n"
        "└─ otherwise -> end\n"
        "careful [large or medium], reads quick\n"
        "└─ always -> end\n"
        "whole [tree: 3 agents]\n"
        "└─ always -> end\n"
        "Classifier subject: sums (1 example), rest (2 examples)\n"
    )
