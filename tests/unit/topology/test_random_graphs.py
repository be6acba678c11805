import re
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from shell_router.errors import TopologyError
from shell_router.topology import parse_topology
from shell_router.topology.draw import draw
from tests.fakes.topologies import parse_steps

TREE = """name: t
tree: {shape: [4, 2, 1], models: [small, large], proposer: {sampling: {temperature: 0.7}}}
early_exit: {policy: paper, tau: 0.7}
prefill: {chunk_tokens: adaptive, slot_order: declared}
"""
GRAPH = """agents:
  a: &a {model: small, prompt: {prefix: "{question}"}}
  b: *a
  c: {model: large, precursors: [a, b], prompt: {slot: "{index} {output}"}}
clusters: {x: {agents: [a, b], early_exit: off}}
"""


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    """Precursors per agent of a random graph with one root, agents shuffled."""
    size = draw(st.integers(1, 12))
    names = [f"n{number}" for number in range(size)]
    precursors: dict[str, list[str]] = {name: [] for name in names}
    for position in range(size - 1):  # each is read by one or more of those after it
        for reader in draw(st.sets(st.sampled_from(names[position + 1 :]), min_size=1, max_size=3)):
            precursors[reader].append(names[position])
    return {name: precursors[name] for name in draw(st.permutations(names))}


@given(graphs())
def test_any_graph_with_one_root_is_read_as_it_was_written(
    precursors: dict[str, list[str]],
) -> None:
    agents = {agent: {"model": "m", "precursors": read} for agent, read in precursors.items()}
    topology = parse_topology(yaml.safe_dump({"agents": agents}, sort_keys=False), source="f")
    assert {agent.id: list(agent.precursors) for agent in topology.agents.values()} == precursors
    seen: set[str] = set()
    for agent in topology.agents.values():
        assert seen.issuperset(agent.precursors)
        seen.add(agent.id)
    assert topology.root.id == f"n{len(precursors) - 1}"
    assert topology.find_needed(()) == set(precursors)
    clustered = [agent for cluster in topology.clusters for agent in cluster.agents]
    assert len(clustered) == len(set(clustered))
    assert all(topology.root.id != agent for agent in clustered)
    assert all(f"{agent} [" in draw(topology) for agent in precursors)


STEPS = """name: s
start:
  - {when: {label: {kind: [a, b]}, matches: "^W"}, go: whole}
  - {when: {classifier: c, is: x, score_below: {small: 0.5}}, go: quick}
  - {go: quick}
steps:
  quick:
    model: small
    then: [{when: {confidence_below: 0.5}, go: careful}, {when: {matches: "(un)?sure", of: output}, go: end}]
  careful: {model: [large, medium], precursors: [quick], prompt: {slot: "{index} {output}"}, then: whole}
  whole: {topology: t}
classifiers: {c: {examples: {x: [y], z: [w]}, min_similarity: 0.1}}
"""
WHOLE = parse_topology(TREE, source="t.yaml")


def loads_or_is_refused(text: str) -> None:
    try:
        if "steps" in text:
            assert draw(parse_steps(text, source="f.yaml", topologies={"t": WHOLE}))
        else:
            assert draw(parse_topology(text, source="f.yaml"))
    except TopologyError as error:
        assert re.match(r"f\.yaml:\d+: \S", str(error))


@given(st.text())
def test_no_text_raises_anything_but_a_topology_error(text: str) -> None:
    loads_or_is_refused(text)


@given(
    st.sampled_from([TREE, GRAPH, STEPS]),
    st.integers(0, 700),
    st.integers(0, 40),
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["*a", "&a ", "<<: ", "!!int ", "{", "]", "\n  ", "'", ": ", "- "]),
    ),
)
def test_no_edit_of_a_file_raises_anything_but_a_topology_error(
    text: str, start: int, cut: int, put: str
) -> None:
    loads_or_is_refused(text[:start] + put + text[start + cut :])


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["a", "on", "off"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@given(st.sampled_from([TREE, GRAPH, STEPS]), st.integers(0, 60), values)
def test_no_value_in_any_place_raises_anything_but_a_topology_error(
    text: str, place: int, value: Any
) -> None:
    content = yaml.safe_load(text)
    places = list(_places(content))
    holder, key = places[place % len(places)]
    holder[key] = value
    loads_or_is_refused(yaml.safe_dump(content))


def _places(value: Any) -> list[tuple[Any, Any]]:
    steps = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))
        if isinstance(value, list)
        else []
    )
    return [(value, step) for step in steps] + [
        place for step in steps for place in _places(value[step])
    ]
