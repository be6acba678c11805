from shell_router.topology import parse_topology
from shell_router.topology.draw import draw

DIAMOND = """
name: diamond
description: a diamond
early_exit: {policy: threshold, threshold: 0.9}
prefill: {chunk_tokens: 16, slot_order: expected_finish}
agents:
  start: {model: small}
  left: {model: small, precursors: [start]}
  right: {model: medium, precursors: [start]}
  judge: {model: large, precursors: [left, right]}
"""


def test_the_terminal_drawing_shows_agents_models_clusters_and_early_exit() -> None:
    assert draw(parse_topology(DIAMOND, source="f")) == (
        "diamond: 4 agents in 3 layers\n"
        "a diamond\n"
        "\n"
        "judge [large]\n"
        "├─ left [small]  (cluster-1)\n"
        "│  └─ start [small]\n"
        "└─ right [medium]  (cluster-1)\n"
        "   └─ start [small]  ↑ above\n"
        "\n"
        "Clusters:\n"
        "  cluster-1  early exit threshold >= 0.9, tau 0.7, from 2 outputs on; left, right\n"
        "Prefill: incremental, chunks of 16 tokens, slots by expected finish\n"
    )


def test_precursors_shared_as_a_whole_are_drawn_once() -> None:
    drawn = draw(parse_topology("all_to_all: {shape: [9, 9, 1], models: [m]}", source="f"))
    assert drawn.count("proposer-5 [") == 1
    assert drawn.count("the 9 precursors of aggregator-1  ↑ above") == 8


def test_a_long_chain_can_be_drawn() -> None:
    links = "".join(f"  a{n}: {{precursors: [a{n - 1}]}}\n" for n in range(1, 1500))
    chain = parse_topology(f"defaults: {{model: m}}\nagents:\n  a0: {{}}\n{links}", source="f")
    assert draw(chain).count("[m]") == 1500
    assert "Clusters: none" in draw(chain)


def test_a_quorum_is_drawn_with_its_grace_time() -> None:
    text = "tree: {shape: [3, 1], models: [m]}\nearly_exit: {policy: quorum, grace_s: 1.5}\n"
    assert "  cluster-1  cut off 1.5 s after 2 outputs; proposer-1" in draw(
        parse_topology(text, source="f")
    )
