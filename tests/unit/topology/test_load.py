from pathlib import Path

import pytest

from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import TopologyError
from shell_router.topology import (
    AUTO,
    Catalog,
    Prefill,
    Prompt,
    Topology,
    files_in,
    load_topology,
    parse_topology,
)
from shell_router.topology.draw import draw
from shell_router.topology.prompting import AGGREGATOR, PROPOSER

TREE = "tree: {shape: [9, 3, 1], models: [small, medium, large]}\n"


def parsed(text: str) -> Topology:
    return parse_topology(text, source="some.yaml")


def models_of(topology: Topology, *agents: str) -> list[str]:
    return [topology.agents[agent].model for agent in agents]


def test_one_line_makes_a_tree() -> None:
    tree = parsed(TREE)
    assert [len(layer) for layer in tree.layers] == [9, 3, 1]
    assert tree.agents["aggregator-2"].precursors == ("proposer-4", "proposer-5", "proposer-6")
    assert tree.root.precursors == ("aggregator-1", "aggregator-2", "aggregator-3")
    assert (tree.name, tree.root.id, tree.prefill) == ("some", "root", Prefill())


def test_every_cluster_of_the_tree_holds_every_model_once_and_the_root_is_the_largest() -> None:
    tree = parsed(TREE)
    assert [models_of(tree, *cluster.agents) for cluster in tree.clusters] == [
        ["small", "medium", "large"]
    ] * 4
    assert tree.root.model == "large"


def drafting(text: str) -> set[str]:
    return {agent.id for agent in parsed(text).agents.values() if agent.drafts}


def test_agents_that_read_others_draft_unless_the_file_says_otherwise() -> None:
    tree = "tree: {shape: [2, 1], models: [m]%s}\n"
    assert drafting(tree % "") == {"root"}
    assert drafting(tree % "" + "defaults: {drafts: off}") == set()
    assert drafting(tree % "" + "defaults: {drafts: on}") == {"root", "proposer-1", "proposer-2"}
    assert drafting(tree % ", proposer: {drafts: on}, root: {drafts: off}") == {
        "proposer-1",
        "proposer-2",
    }


def test_each_agent_of_a_tree_has_one_successor() -> None:
    tree = parsed(TREE)
    assert {len(after) for agent, after in tree.successors.items() if agent != "root"} == {1}


def test_all_to_all_reads_the_whole_layer_before_and_judges_layers() -> None:
    dense = parsed("all_to_all: {shape: [9, 9, 1], models: [small, medium, large]}")
    assert [len(layer) for layer in dense.layers] == [9, 9, 1]
    assert {dense.agents[agent].precursors for agent in dense.layers[1]} == {dense.layers[0]}
    assert [cluster.agents for cluster in dense.clusters] == list(dense.layers[:2])


def test_deeper_trees_number_their_layers_of_aggregators() -> None:
    tree = parsed("tree: {shape: [8, 4, 2, 1], models: [m], root_model: judge}")
    assert tree.agents["aggregator3-2"].precursors == ("aggregator2-3", "aggregator2-4")
    assert models_of(tree, "proposer-8", "root") == ["m", "judge"]


def test_roles_get_their_prompts_and_sampling_and_the_root_adds_to_the_aggregators() -> None:
    tree = parsed("""
tree:
  shape: [4, 2, 1]
  models: [m]
  proposer: {prompt: {system: Be brief.}, sampling: {temperature: 0.7}}
  aggregator: {prompt: {suffix: Go.}, sampling: {temperature: 0.3}, timeout_s: 9}
  root: {sampling: {max_new_tokens: 5}}
defaults: {sampling: {max_new_tokens: 256}}
""")
    proposer, aggregator, root = (
        tree.agents[agent] for agent in ("proposer-1", "aggregator-1", "root")
    )
    assert proposer.prompt == Prompt(system="Be brief.")
    assert proposer.sampling == {"temperature": 0.7, "max_new_tokens": 256}
    assert (aggregator.prompt.suffix, aggregator.prompt.slot) == ("Go.", AGGREGATOR.slot)
    assert (root.sampling, root.timeout_s) == ({"temperature": 0.3, "max_new_tokens": 5}, 9)
    assert (root.prompt, proposer.timeout_s) == (aggregator.prompt, 600)


GRAPH = """
name: diamond
description: four agents
on_failure: drop
defaults: {model: small, sampling: {temperature: 0}, timeout_s: 30}
early_exit: {tau: 0.5, min_completed: 1}
agents:
  judge: {precursors: [right, left], model: large}
  left: {precursors: [start]}
  right: {precursors: [start], on_failure: fail, sampling: {top_k: 4}}
  start: {prompt: {prefix: "{{}} {question}"}}
"""


def test_the_full_form_takes_agents_in_any_order_and_puts_precursors_first() -> None:
    diamond = parsed(GRAPH)
    assert list(diamond.agents) == ["start", "left", "right", "judge"]
    assert diamond.root.precursors == ("right", "left")
    assert (diamond.name, diamond.description) == ("diamond", "four agents")


def test_an_agents_own_word_counts_before_the_defaults() -> None:
    agents = parsed(GRAPH).agents
    assert (agents["judge"].model, agents["left"].model) == ("large", "small")
    assert agents["right"].sampling == {"temperature": 0, "top_k": 4}
    assert {agent: agents[agent].on_failure for agent in agents} == {
        "start": "drop",
        "left": "drop",
        "right": "fail",
        "judge": "fail",  # a root that is dropped would leave no answer
    }


def test_agents_get_the_default_prompt_that_fits_their_place() -> None:
    agents = parsed(GRAPH).agents
    assert agents["start"].prompt == Prompt(prefix="{{}} {question}", slot=PROPOSER.slot)
    assert agents["left"].prompt == AGGREGATOR


def test_agents_with_the_same_successors_are_judged_together_and_one_alone_is_not() -> None:
    clusters = parsed(GRAPH).clusters
    assert [cluster.agents for cluster in clusters] == [("left", "right")]
    assert clusters[0].early_exit == EarlyExit(tau=0.5, min_completed=1)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", EarlyExit(tau=0.5, min_completed=1)),
        (", early_exit: on", EarlyExit(tau=0.5, min_completed=1)),
        (", early_exit: off", None),
        (", early_exit: 'off'", None),
        (", early_exit: {policy: threshold, min_completed: 2}", EarlyExit("threshold", tau=0.5)),
        (
            ", early_exit: {policy: in_flight, skip_aggregation: 'on'}",
            EarlyExit("in_flight", tau=0.5, min_completed=1, skip_aggregation=True),
        ),
    ],
)
def test_a_cluster_has_its_own_early_exit_over_that_of_the_topology(
    said: str, expected: EarlyExit | None
) -> None:
    clusters = parsed(GRAPH + f"clusters: {{middle: {{agents: [left, right]{said}}}}}").clusters
    assert [(cluster.id, cluster.early_exit) for cluster in clusters] == [("middle", expected)]


@pytest.mark.parametrize(
    ("said", "expected"), [("", None), ("early_exit: off", None), ("early_exit: on", EarlyExit())]
)
def test_without_a_word_there_is_no_early_exit(said: str, expected: EarlyExit | None) -> None:
    assert {cluster.early_exit for cluster in parsed(TREE + said).clusters} == {expected}


def test_prefill_settings_reach_the_topology() -> None:
    prefill = parsed(
        TREE + "prefill: {chunk_tokens: 32, incremental: off, slot_order: expected_finish}"
    ).prefill
    assert prefill == Prefill(False, 32, "expected_finish")


def test_sampling_parameters_of_other_names_pass_through() -> None:
    text = (
        "agents: {a: {model: m, sampling: {custom: [1, {deep: null}], stop: [x], logit_bias: "
        "{'7': -1.5}}}}"
    )
    assert parsed(text).root.sampling == {
        "custom": [1, {"deep": None}],
        "stop": ["x"],
        "logit_bias": {"7": -1.5},
    }


def test_a_question_may_be_ignored_where_nothing_is_read() -> None:
    assert (
        parsed("agents: {a: {model: m, prompt: {prefix: Tell a joke.}}}").root.prompt.prefix
        == "Tell a joke."
    )


def test_a_model_may_be_left_to_choose() -> None:
    file = parse_topology(
        "agents: {a: {}, b: {precursors: [a], model: auto}}\ndefaults: {model: [m, n]}",
        source="graph.yaml",
        models=("m", "n"),
    )
    assert (file.agents["a"].model, file.agents["a"].candidates) == (AUTO, ("m", "n"))
    assert (file.root.model, file.root.candidates) == (AUTO, ())
    assert "a [m or n]" in draw(file)


def test_a_layer_of_a_tree_may_hold_auto() -> None:
    tree = parsed("tree: {shape: [2, 1], models: [auto, m], root_model: auto}")
    assert [agent.model for agent in tree.agents.values()] == [AUTO, "m", AUTO]


def test_chosen_models_take_the_place_of_what_was_to_choose_from() -> None:
    tree = parsed("tree: {shape: [2, 1], models: [auto, m]}")
    chosen = tree.with_models({"proposer-1": "n"})
    assert [agent.model for agent in chosen.agents.values()] == ["n", "m", "m"]
    assert chosen.successors == tree.successors


def test_known_models_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "tree.yaml"
    file.write_text(TREE, encoding="utf-8")
    assert load_topology(file, models={"small", "medium", "large", "huge"}).name == "tree"
    with pytest.raises(TopologyError, match=r"tree\.yaml:1: Unknown model 'medium'"):
        load_topology(file, models={"small", "large"})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"gone\.yaml:1: The file cannot be read"):
        load_topology(tmp_path / "gone.yaml")


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"name: x\ndescription: \xff\n")
    with pytest.raises(TopologyError, match=r"f\.yaml:2: This is not UTF-8"):
        load_topology(tmp_path / "f.yaml")


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbf" + TREE.encode())
    assert load_topology(tmp_path / "f.yaml").name == "f"


def test_a_folder_is_loaded_by_topology_name(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(TREE, encoding="utf-8")
    (tmp_path / "two.yml").write_text(GRAPH, encoding="utf-8")
    (tmp_path / "schema.json").write_text("{}", encoding="utf-8")
    topologies = Catalog(None).of_files(files_in(tmp_path)).entries
    assert {name: one.graph.name for name, one in topologies.items()} == {
        "one": "one",
        "diamond": "diamond",
    }


def test_two_files_may_not_share_a_name(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(TREE, encoding="utf-8")
    (tmp_path / "two.yaml").write_text(TREE + "name: one\n", encoding="utf-8")
    with pytest.raises(
        TopologyError, match=r"two\.yaml:2: The name 'one' is already that of .*one\.yaml"
    ):
        Catalog(None).of_files(files_in(tmp_path))


def test_a_folder_tells_what_is_wrong_in_each_file(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("", encoding="utf-8")
    (tmp_path / "two.yaml").write_text("nme: x\n" + TREE, encoding="utf-8")
    with pytest.raises(TopologyError) as error:
        Catalog(None).of_files(files_in(tmp_path))
    assert [line.split(":")[1] for line in str(error.value).splitlines()] == ["1", "1"]
    assert "one.yaml" in str(error.value)
    assert "Did you mean 'name'?" in str(error.value)


def test_a_folder_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="not a folder"):
        Catalog(None).of_files(files_in(tmp_path / "nowhere"))
