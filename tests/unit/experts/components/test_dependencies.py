"""What topologies say of components: who follows on whom, and how often each is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.errors import ConfigError, DataError
from shell_router.experts.components import Component
from shell_router.experts.components.usage import SampledRequest, component_uses, predecessors, read_sample, usages
from shell_router.topology import Conditional, Topology, parse_steps, parse_topology

MODELS = ("small", "medium", "large")


def tree(*models: str, root: str) -> Topology:
    return parse_topology(
        f"name: tree\ntree: {{shape: [{len(models)}, 1], models: [{', '.join(models)}], root_model: {root}}}",
        source="t",
    )


def steps(text: str, *topologies: Topology) -> Conditional:
    return parse_steps(text, source="steps.yaml", topologies={one.name: one for one in topologies})


BOARDS = steps(
    """name: boards
start:
  - {when: {label: {type: capacitor}}, go: capacitor}
  - {when: {label: {type: chip}}, go: chip}
  - {go: other}
steps:
  capacitor: {model: classifier-1, then: [{when: {matches: damaged}, go: end}, {go: alignment}]}
  chip: {model: classifier-2, then: [{when: {matches: damaged}, go: end}, {go: alignment}]}
  other: {model: classifier-3}
  alignment: {model: "base:detector"}
"""
)


def test_an_aggregator_follows_on_its_precursors_models() -> None:
    assert predecessors([tree("a", "b", root="c")], MODELS) == {
        "a": frozenset(),
        "b": frozenset(),
        "c": frozenset({"a", "b"}),
    }


def test_an_expert_of_a_step_follows_on_those_that_lead_to_it() -> None:
    assert predecessors([BOARDS], MODELS) == {
        "classifier-1": frozenset(),
        "classifier-2": frozenset(),
        "classifier-3": frozenset(),
        "base:detector": frozenset({"classifier-1", "classifier-2"}),
    }


def test_a_component_that_may_come_first_anywhere_has_no_predecessor() -> None:
    both = [tree("a", root="b"), steps("name: x\nstart: s\nsteps: {s: {model: b}}")]
    assert predecessors(both, MODELS) == {"a": frozenset(), "b": frozenset()}


def test_a_step_that_the_start_leads_to_may_come_first_though_others_lead_to_it() -> None:
    text = """start: [{when: {matches: x}, go: b}, {go: a}]
steps: {a: {model: one, then: b}, b: {model: two, then: c}, c: {model: three}}
"""
    assert predecessors([steps(text)], MODELS) == {
        "one": frozenset(),
        "two": frozenset(),
        "three": frozenset({"two"}),
    }


def test_a_topology_in_a_step_follows_with_its_leaves_and_leads_on_with_its_root() -> None:
    text = "start: a\nsteps: {a: {model: first, then: t}, t: {topology: tree, then: z}, z: {model: last}}"
    assert predecessors([steps(text, tree("leaf", root="root"))], MODELS) == {
        "first": frozenset(),
        "leaf": frozenset({"first"}),
        "root": frozenset({"leaf"}),
        "last": frozenset({"root"}),
    }


def test_no_expert_follows_on_itself() -> None:
    text = "start: a\nsteps: {a: {model: m, then: b}, b: {model: n, then: c}, c: {model: n}}"
    assert predecessors([steps(text)], MODELS)["n"] == {"m"}


def test_an_agent_that_chooses_stands_for_all_its_models() -> None:
    text = "start: a\nsteps: {a: {model: [small, large], then: b}, b: {model: auto}}"
    found = predecessors([steps(text)], ("small", "medium"))
    assert found == {"small": frozenset(), "large": frozenset(), "medium": frozenset({"small", "large"})}


def test_a_choice_among_unknown_components_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Agent 'a' chooses by auto\. Name the models"):
        predecessors([steps("start: a\nsteps: {a: {model: auto}}")], ())


SAMPLE = [SampledRequest("boards", {"type": "capacitor"})] * 2 + [
    SampledRequest("boards", {"type": "chip"}),
    SampledRequest("boards", {}),
]
CHANCES = {("boards", "capacitor"): {"end": 0.5, "alignment": 0.5}, ("boards", "chip"): {"alignment": 1.0}}


def test_labels_of_a_sample_and_chances_give_the_share_of_requests_that_need_an_expert() -> None:
    assert usages({"boards": BOARDS}, SAMPLE, MODELS, CHANCES) == pytest.approx(
        {"classifier-1": 0.5, "classifier-2": 0.25, "classifier-3": 0.25, "base:detector": 0.5}
    )


def test_what_is_found_is_what_a_pools_experts_are_made_of() -> None:
    uses = component_uses({"boards": BOARDS}, SAMPLE, MODELS, CHANCES)
    catalog = [Component(name, "resnet", 1000, use.probability, use.after) for name, use in uses.items()]
    assert [component.name for component in catalog if not component.after] == [
        "classifier-1",
        "classifier-2",
        "classifier-3",
    ]


def test_given_chances_take_the_place_of_a_sample() -> None:
    chances = {**CHANCES, ("boards", "start"): {"capacitor": 0.6, "chip": 0.3, "other": 0.1}}
    found = usages({"boards": BOARDS}, [SampledRequest("boards")], MODELS, chances)
    assert found["classifier-1"] == pytest.approx(0.6) and found["base:detector"] == pytest.approx(0.6)


def test_topologies_count_by_their_weights() -> None:
    graphs = {"boards": BOARDS, "tree": tree("a", root="b")}
    asked = [SampledRequest("boards", weight=3), SampledRequest("tree", weight=1)]
    found = usages(graphs, asked, MODELS, CHANCES)
    assert (found["classifier-3"], found["a"], found["classifier-1"]) == (0.75, 0.25, 0.0)


def test_a_question_decides_rules_that_read_it() -> None:
    read = steps("name: q\nstart: [{when: {matches: '^Why'}, go: a}, {go: b}]\nsteps: {a: {model: x}, b: {model: y}}")
    asked = [SampledRequest("q", question="Why?"), *[SampledRequest("q", question="How?")] * 3]
    assert usages({"q": read}, asked, MODELS, {}) == {"x": 0.25, "y": 0.75}


def test_an_expert_of_two_steps_is_needed_once() -> None:
    text = "name: q\nstart: a\nsteps: {a: {model: x, then: b}, b: {model: x}}"
    assert usages({"q": steps(text)}, [SampledRequest("q")], MODELS, {}) == {"x": 1.0}


def test_a_choice_needs_each_of_its_models_in_an_equal_share() -> None:
    assert usages({"q": steps("name: q\nstart: a\nsteps: {a: {model: auto}}")}, [SampledRequest("q")], MODELS, {}) == (
        pytest.approx(dict.fromkeys(MODELS, 1 / 3))
    )


@pytest.mark.parametrize(
    ("asked", "chances", "message"),
    [
        (
            [SampledRequest("boards", {"type": "chip"})],
            {},
            "how often 'chip' leads to 'end' is not known: output matches 'dam",
        ),
        ([SampledRequest("boards", {"type": "chip"}, "damaged?")], {}, "how often 'chip' leads to 'end' is not known"),
        ([SampledRequest("bords")], {}, "names the topology 'bords'. Known: boards"),
        ([], {}, "Give a sample"),
        (SAMPLE, {("boards", "capacitor"): {"end": 0.5}}, "sum up to 1"),
        (SAMPLE, {("boards", "capacitor"): {"chip": 1.0}}, "name chip. It leads to alignment, end"),
        (SAMPLE, {**CHANCES, ("boards", "chop"): {"end": 1.0}}, "boards/chop, which is nowhere. Known: boards/start, "),
        (SAMPLE, {**CHANCES, ("bards", "chip"): {"end": 1.0}}, "bards/chip, which is nowhere"),
        (
            [SampledRequest("boards", None)],
            CHANCES,
            "how often 'start' leads to 'capacitor' is not known: label type is 'cap",
        ),
    ],
)
def test_missing_chances_are_asked_for(asked: list[SampledRequest], chances: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=message):
        usages({"boards": BOARDS}, asked, MODELS, chances)


def test_a_question_that_the_sample_lacks_is_asked_for_only_where_labels_leave_it_open() -> None:
    read = steps(
        "name: q\nstart: [{when: {label: {k: v}, matches: '^Why'}, go: a}, {go: b}]\n"
        "steps: {a: {model: x}, b: {model: y}}"
    )
    assert usages({"q": read}, [SampledRequest("q")], MODELS, {}) == {"x": 0.0, "y": 1.0}
    with pytest.raises(ConfigError, match="how often 'start' leads to 'a' is not known"):
        usages({"q": read}, [SampledRequest("q", {"k": "v"})], MODELS, {})


@pytest.mark.parametrize("when", ["score_below: {x: 0.5}", "classifier: c, is: sums, of: request"])
def test_what_only_the_deployment_can_tell_is_asked_for(when: str) -> None:
    read = steps(
        f"name: q\nstart: [{{when: {{{when}}}, go: a}}, {{go: b}}]\nsteps: {{a: {{model: x}}, b: {{model: y}}}}\n"
        + ("classifiers: {c: {examples: {sums: [one and two]}}}" if "classifier" in when else "")
    )
    with pytest.raises(ConfigError, match="how often 'start' leads to 'a' is not known"):
        usages({"q": read}, [SampledRequest("q", {}, "one and two")], MODELS, {})


def test_a_question_may_hold_any_separator_of_lines() -> None:
    assert read_sample('{"model": "a", "question": "x\u2028y\x85z"}\r\n', source="f") == [
        SampledRequest("a", {}, "x\u2028y\x85z")
    ]


def test_a_sample_is_read_line_by_line() -> None:
    text = '{"model": "a", "metadata": {"x": "y"}, "question": "Why?"}\n\n{"model": "b", "more": 1}\n'
    assert read_sample(text, source="f") == [SampledRequest("a", {"x": "y"}, "Why?"), SampledRequest("b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f:2: The line is not JSON"),
        ("[]", "f:2: The line names no topology"),
        ('{"model": 3}', "f:2: The line names no topology"),
        ('{"model": "a", "metadata": {"x": 1}}', "f:2: metadata is not an object of texts"),
        ('{"model": "a", "question": 1}', "f:2: question is not a text"),
    ],
)
def test_a_wrong_line_of_a_sample_is_named(line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_sample(f'{{"model": "a"}}\n{line}\n', source="f")


CHAIN = steps(
    """name: chain
start: s0
steps:
  s0: {model: m0, then: [{when: {matches: x}, go: s1}, {when: {matches: y}, go: s2}]}
  s1: {model: m1, then: [{when: {matches: x}, go: s2}, {go: end}]}
  s2: {model: m0}
"""
)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_usage_is_what_walking_all_ways_gives(to_1: float, rest: float, onward: float) -> None:
    first = {"s1": to_1, "s2": (1 - to_1) * rest, "end": (1 - to_1) * (1 - rest)}
    chances = {("chain", "s0"): first, ("chain", "s1"): {"s2": onward, "end": 1 - onward}}
    found = usages({"chain": CHAIN}, [SampledRequest("chain")], MODELS, chances)
    assert found["m0"] == pytest.approx(1.0) and found["m1"] == pytest.approx(first["s1"])
