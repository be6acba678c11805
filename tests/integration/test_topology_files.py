"""The shipped topologies, their schema and their guide agree with the loader."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from shell_router.errors import TopologyError
from shell_router.topology import (
    Catalog,
    Conditional,
    Graph,
    files_in,
    load_topology,
    parse_topology,
    topology_schema,
)
from shell_router.topology.prompting import fill_text, slot_parts
from tests.fakes.topologies import parse_steps

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "how-to" / "write-a-topology.md"
FILES = sorted((ROOT / "topologies").glob("*.yaml"))
MODELS = ("small", "medium", "large")


@pytest.fixture(scope="module")
def shipped() -> dict[str, Graph]:
    return Catalog(MODELS).of_files(files_in(ROOT / "topologies")).graphs_without("")


def test_the_shipped_topologies_are_there(shipped: dict[str, Graph]) -> None:
    agents = {"tree-9-3-1", "all-to-all-9-9-1", "plan-solve-verify", "tiny"}
    agents |= {"grow-from-first", "self-consistency", "confidence-vote", "best-of-n"}
    steps = {"small-first", "by-request", "self-refine"}
    assert set(shipped) == agents | steps
    assert {name for name, one in shipped.items() if isinstance(one, Conditional)} == steps


def test_the_tree_and_its_baseline_have_the_papers_shapes(shipped: dict[str, Graph]) -> None:
    shapes = {
        name: [len(layer) for layer in shipped[name].layers]
        for name in ("tree-9-3-1", "all-to-all-9-9-1")
    }
    assert shapes == {"tree-9-3-1": [9, 3, 1], "all-to-all-9-9-1": [9, 9, 1]}


def test_only_the_tree_exits_early(shipped: dict[str, Graph]) -> None:
    assert all(cluster.early_exit for cluster in shipped["tree-9-3-1"].clusters)
    assert not any(cluster.early_exit for cluster in shipped["all-to-all-9-9-1"].clusters)


def test_the_verifier_reads_plan_and_solution(shipped: dict[str, Graph]) -> None:
    assert shipped["plan-solve-verify"].root.precursors == ("planner", "solver")


def test_every_shipped_prompt_can_be_filled_and_asks_the_question(
    shipped: dict[str, Graph],
) -> None:
    agents = (agent for topology in shipped.values() for agent in topology.agents.values())
    for agent in (agent for agent in agents if not agent.votes):
        assert "1+1?" in fill_text(agent.prompt.prefix, "1+1?")
        assert len(fill_text(agent.prompt.suffix, "").split()) <= 5
        for index, precursor in enumerate(agent.precursors, start=1):
            assert slot_parts(agent.prompt.slot, precursor, index)[0].startswith("\n")


def test_the_committed_schema_is_the_generated_one() -> None:
    committed = json.loads((ROOT / "topologies" / "schema.json").read_text(encoding="utf-8"))
    assert committed == topology_schema(), "write it anew: docs/how-to/write-a-topology.md says how"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    Draft202012Validator.check_schema(topology_schema())
    return Draft202012Validator(topology_schema())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_editors_know_the_schema_of_a_shipped_file_and_accept_it(
    file: Path, validator: Draft202012Validator
) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    validator.validate(yaml.safe_load(text))


CHANGES: dict[str, tuple[tuple[str, ...], Any]] = {
    "unknown key": (("nmae",), "x"),
    "unknown key of an agent": (("agents", "planner", "modl"), "m"),
    "unknown key of a prompt": (("agents", "planner", "prompt", "postfix"), "m"),
    "unknown key of prefill": (("prefill",), {"chunk": 3}),
    "unknown key of early exit": (("early_exit",), {"tua": 0.5}),
    "unknown key of a cluster": (("clusters",), {"x": {"agents": ["planner"], "policy": "off"}}),
    "a second graph": (("tree",), {"shape": [2, 1], "models": ["m"]}),
    "text for a number": (("agents", "planner", "timeout_s"), "soon"),
    "a number for text": (("agents", "planner", "model"), 3),
    "an empty alias": (("agents", "planner", "model"), ""),
    "text for a list": (("agents", "solver", "precursors"), "planner"),
    "a list for a mapping": (("agents",), ["planner"]),
    "no agents": (("agents",), {}),
    "a bad id": (("agents",), {"a b": {"model": "m"}}),
    "a bad sampling value": (("defaults", "sampling", "temperature"), -1),
    "a bad choice": (("prefill",), {"slot_order": "random"}),
    "a bad bound": (("early_exit",), {"tau": 0}),
    "a bad chunk": (("prefill",), {"chunk_tokens": 0}),
    "a bad switch": (("early_exit",), "sometimes"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_schema_refuses_what_the_loader_refuses(
    change: str, validator: Draft202012Validator
) -> None:
    content = yaml.safe_load(
        (ROOT / "topologies" / "plan-solve-verify.yaml").read_text(encoding="utf-8")
    )
    (*path, key), value = CHANGES[change]
    place = content
    for step in path:
        place = place[step]
    place[key] = value
    assert not validator.is_valid(content)
    with pytest.raises(TopologyError):
        parse_topology(yaml.safe_dump(content), source="f.yaml")


CHANGES_OF_STEPS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "an unknown key": (("steps", "quick", "next"), "careful"),
    "a rule without a target": (("start",), [{"when": {"label": {"a": "b"}}}]),
    "no rule": (("start",), []),
    "a number for a label": (("start", 0, "when", "label", "effort"), 3),
    "no examples": (("classifiers", "subject"), {"examples": {}}),
    "an unknown subject": (("start", 0, "when", "of"), "answer"),
    "a step that several may follow if it fails": (("steps", "quick", "on_failure"), ["careful"]),
}


@pytest.mark.parametrize("change", CHANGES_OF_STEPS)
def test_the_schema_refuses_what_the_loader_refuses_of_steps(
    change: str, validator: Draft202012Validator
) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    content = next(
        yaml.safe_load(block.split("```")[0])
        for block in guide.split("```yaml\n")
        if "name: triage" in block
    )
    assert validator.is_valid(content)
    (*path, key), value = CHANGES_OF_STEPS[change]
    place = content
    for step in path:
        place = place[step]
    place[key] = value
    assert not validator.is_valid(content)
    tree = load_topology(ROOT / "topologies" / "tree-9-3-1.yaml")
    with pytest.raises(TopologyError):
        parse_steps(yaml.safe_dump(content), source="f.yaml", topologies={tree.name: tree})


def test_the_guide_names_every_key_and_choice() -> None:
    guide = (ROOT / "docs" / "reference" / "topology.md").read_text(encoding="utf-8")
    assert [word for word in sorted(_words(topology_schema())) if word not in guide] == []


def _words(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_words, schema))
    if not isinstance(schema, dict):
        return set()
    own = {
        *schema.get("properties", ()),
        *(word for word in schema.get("enum", ()) if isinstance(word, str)),
    }
    return own.union(*map(_words, schema.values()))


def test_the_guides_examples_load(tmp_path: Path) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    examples = [block.split("```")[0] for block in guide.split("```yaml\n")[1:]]
    assert len(examples) >= 3
    for number, example in enumerate(examples):
        file = tmp_path / f"example-{number}.yaml"
        file.write_text(example, encoding="utf-8")
        Catalog(MODELS).of_files([file, *(one for one in FILES if one.stem == "tree-9-3-1")])
