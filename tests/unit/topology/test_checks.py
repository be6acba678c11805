import pytest

from shell_router.errors import TopologyError
from shell_router.topology import parse_topology
from shell_router.topology.checks import form_problems
from shell_router.topology.keys import OF_STEPS

AGENTS = """agents:
  a: {model: m}
  b: {model: m}
  c: {model: m, precursors: [a, b]}
"""

WRONG = {
    "not a mapping": ("- a\n", 1, "The file must be a mapping, not a list"),
    "no graph": ("name: x\n", 1, "No graph is described"),
    "two graphs": (
        AGENTS + "tree: {shape: [2, 1], models: [m]}\n",
        1,
        "described twice, by 'tree' and by 'agents'",
    ),
    "no agents": ("agents: {}\n", 1, "agents must be a mapping with entries, not an empty mapping"),
    "unknown key": ("descripton: x\n" + AGENTS, 1, "Did you mean 'description'?"),
    "unknown key of an agent": (
        "agents:\n  a:\n    modl: m\n",
        3,
        "Unknown key 'modl' in agents.a",
    ),
    "unknown key without a likeness": ("zzz: 1\n" + AGENTS, 1, "Known: name, description, tree"),
    "bad name": ("name: a b\n" + AGENTS, 1, "name must be a name of letters"),
    "bad agent id": ("agents:\n  'a/b': {model: m}\n", 2, "must be a name of letters"),
    "name of the wrong kind": ("name: 7\n" + AGENTS, 1, "name must be a name of letters .* not 7"),
    "a name of other letters": ("name: größe\n" + AGENTS, 1, "letters a to z"),
    "a precursor by another key": (
        "agents:\n  a: {model: m}\n  b: {model: m, reads: [a]}\n",
        3,
        "Unknown key 'reads'.*precursors",
    ),
    "a sampling parameter with a fault": (
        "defaults: {sampling: {temprature: 0.2}}\n" + AGENTS,
        1,
        "defaults.sampling.temprature.*'temperature'",
    ),
    "a sampling parameter by OpenAI's name": (
        "agents:\n  a: {model: m, sampling: {max_tokens: 2}}\n",
        2,
        "agents.a.sampling.max_tokens.*'max_new_tokens'",
    ),
    "a seed by OpenAI's name": (
        "tree: {shape: [2, 1], models: [m], root: {sampling: {seed: 2}}}\n",
        1,
        "tree.root.sampling.seed.*'sampling_seed'",
    ),
    "a placeholder as text": (
        "defaults: {prompt: {prefix: 'Q: {{question}}'}}\n" + AGENTS,
        1,
        "{{question}} is text.*Write {question}",
    ),
    "an output as text": (
        "tree: {shape: [2, 1], models: [m], root: {prompt: {slot: '{{output}}'}}}\n",
        1,
        "{{output}} is text",
    ),
    "tools where the fan-out is not kept": (
        "fan_out: request\ntree: {shape: [2, 1], models: [m], proposer: {tools: on}}\n",
        1,
        "Below the root proposer-1, proposer-2 may call tools, .*with fan_out",
    ),
    "tools beside an early exit": (
        "tree: {shape: [2, 1], models: [m], proposer: {tools: on}}\nearly_exit: on\n",
        2,
        "may call tools, .*with early_exit",
    ),
    "tools beside a reserve": (
        "defaults: {tools: on}\nroot_reserve_s: 5\n" + AGENTS,
        2,
        "Below the root a, b may call tools, .*with root_reserve_s",
    ),
    "tools beside a vote": (
        "tree: {shape: [2, 1], models: [m], proposer: {tools: on}, root: {vote: majority}}\n",
        1,
        "may call tools, .*with vote",
    ),
    "tools of a vote": (
        "agents:\n  a: {model: m}\n  b: {model: m}\n"
        "  c: {vote: majority, precursors: [a, b], tools: on}\n",
        4,
        "votes and asks no model, so it cannot have 'tools'",
    ),
    "tools of an agent whose name fits no id": (
        "agents:\n  a.b: {model: m, tools: on}\n  c: {model: m, precursors: [a.b]}\n",
        2,
        "ids of calls name it",
    ),
    "more outputs than agents": (
        "tree: {shape: [3, 1], models: [m]}\nearly_exit: {policy: quorum, min_completed: 5}\n",
        2,
        "min_completed is above the number of agents",
    ),
    "a first agent that waits for others": (
        "tree: {shape: [4, 2, 1], models: [m]}\nearly_exit: {ask_first: on}\n",
        1,
        "'aggregator-1', the first of its cluster, reads other agents. List an agent without precursors",
    ),
    "more outputs than a cluster's agents": (
        AGENTS + "clusters: {x: {agents: [a, b], early_exit: {min_completed: 3}}}\n",
        1,
        "min_completed is above the number of agents",
    ),
    "empty model": ("agents:\n  a: {model: ' '}\n", 2, "agents.a.model must be a model alias"),
    "nothing to choose from": (
        "agents:\n  a: {model: []}\n",
        2,
        "a model alias or a list of 1 to 1024 items, not an empty list",
    ),
    "auto among others": (
        "agents:\n  a:\n    model: [m, auto]\n",
        3,
        "'auto' cannot be one of several models",
    ),
    "a model twice": ("agents:\n  a: {model: [m, m]}\n", 2, "agents.a.model: it names 'm' twice"),
    "an unknown candidate": ("agents:\n  a: {model: [m, q]}\n", 2, "Unknown model 'q'"),
    "no model": ("agents:\n  a: {}\n", 2, "Agent 'a' has no model"),
    "unknown model": ("agents:\n  a: {model: n}\n", 2, "Unknown model 'n'.*Known: m"),
    "unknown default model": (
        "defaults: {model: mm}\n" + AGENTS,
        1,
        "Unknown model 'mm'.*Did you mean 'm'",
    ),
    "unknown model of a tree": (
        "tree:\n  shape: [2, 1]\n  models:\n    - m\n    - q\n",
        5,
        "Unknown model 'q'",
    ),
    "unknown model of a root": (
        "tree: {shape: [2, 1], models: [m],\n  root_model: q}\n",
        2,
        "Unknown model 'q'",
    ),
    "unknown precursor": (
        "agents:\n  abc: {model: m}\n  b:\n    model: m\n    precursors:\n      - abd\n",
        6,
        "'abc'",
    ),
    "self": ("agents:\n  a: {model: m, precursors: [a]}\n", 2, "Agent 'a' reads itself"),
    "precursor twice": (
        "agents:\n  a: {model: m}\n  b: {model: m, precursors: [a, a]}\n",
        3,
        "agents.b.precursors: it names 'a' twice",
    ),
    "precursors of the wrong kind": (
        "agents:\n  a: {model: m, precursors: b}\n",
        2,
        "must be a list, not 'b'",
    ),
    "a limit of thinking that readers get": (
        "agents:\n  a: {model: m, readers_get: all, max_thinking_tokens: 9}\n",
        2,
        "its readers get its thinking, too",
    ),
    "two roots": (AGENTS + "  d: {model: m, precursors: [a]}\n", 5, "two roots: 'c' and 'd'"),
    "two roots and nothing else": (
        "agents:\n  a: {model: m}\n  b: {model: m}\n",
        3,
        "two roots: 'a' and 'b'",
    ),
    "unreachable": (AGENTS + "  d: {model: m}\n", 5, "Agent 'd' is unreachable"),
    "slot without precursor": (
        "agents:\n  a:\n    model: m\n    prompt:\n      slot: '{output}'\n",
        5,
        "has a slot",
    ),
    "text for the slot of no precursor": (
        "agents:\n  a: {model: m}\n  b:\n    model: m\n    precursors: [a]\n"
        "    prompt: {slots: {aa: '{output}'}}\n",
        6,
        "'aa' is no precursor",
    ),
    "slot of a proposer": (
        "tree:\n  shape: [2, 1]\n  models: [m]\n  proposer: {prompt: {slot: '{output}'}}\n",
        4,
        "prompt of a proposer has a slot",
    ),
    "slot without output": (
        "defaults: {prompt: {slot: 'x'}}\n" + AGENTS,
        1,
        "holds {output} 0 times",
    ),
    "slot with two outputs": (
        "defaults: {prompt: {slot: '{output}{output}'}}\n" + AGENTS,
        1,
        "2 times",
    ),
    "slot with the question": (
        "defaults: {prompt: {slot: '{output}{question}'}}\n" + AGENTS,
        1,
        "{question}",
    ),
    "unknown placeholder": (
        "defaults: {prompt: {prefix: '{qestion}'}}\n" + AGENTS,
        1,
        "placeholder {qestion}",
    ),
    "reaching into a value": (
        "defaults: {prompt: {system: '{question.x}'}}\n" + AGENTS,
        1,
        "{question.x}",
    ),
    "format": (
        "defaults: {prompt: {suffix: '{question:>9}'}}\n" + AGENTS,
        1,
        "a conversion or a format",
    ),
    "single brace": ("defaults: {prompt: {suffix: 'a { b'}}\n" + AGENTS, 1, "Write {{ and }}"),
    "agent in two clusters": (
        AGENTS + "clusters:\n  x: {agents: [a, b]}\n  y: {agents: [b]}\n",
        7,
        "'b' is in cluster 'x' and again in 'y'",
    ),
    "agent twice in a cluster": (AGENTS + "clusters: {x: {agents: [a, a]}}\n", 5, "again in 'x'"),
    "unknown member": (
        AGENTS + "clusters: {x: {agents: [a, z]}}\n",
        5,
        "holds 'z', which is not an agent",
    ),
    "root in a cluster": (AGENTS + "clusters: {x: {agents: [a, c]}}\n", 5, "holds the root 'c'"),
    "empty cluster": (
        AGENTS + "clusters: {x: {agents: []}}\n",
        5,
        "x.agents must be a list of 1 or more items, not an empty list",
    ),
    "cluster without agents": (AGENTS + "clusters: {x: {}}\n", 5, "lacks 'agents'"),
    "dropped root": ("agents:\n  a: {model: m, on_failure: drop}\n", 2, "root cannot be dropped"),
    "dropped root of a tree": (
        "tree: {shape: [2, 1], models: [m], root: {on_failure: drop}}\n",
        1,
        "be dropped",
    ),
    "sampling of the wrong kind": (
        "defaults: {sampling: [1]}\n" + AGENTS,
        1,
        "must be a mapping, not a list",
    ),
    "sampling out of bounds": (
        "defaults: {sampling: {temperature: -1}}\n" + AGENTS,
        1,
        "at least 0, not -1",
    ),
    "number as YAML reads it": ("defaults: {sampling: {top_p: 1e-3}}\n" + AGENTS, 1, "not '1e-3'"),
    "sampling that JSON cannot say": (
        "defaults: {sampling: {x: [.inf]}}\n" + AGENTS,
        1,
        "x.0. must be a finite number",
    ),
    "several outputs": (
        "defaults: {sampling: {n: 2}}\n" + AGENTS,
        1,
        "defaults.sampling.n must be",
    ),
    "no time": ("defaults: {timeout_s: 0}\n" + AGENTS, 1, "above 0"),
    "no number": ("defaults: {timeout_s: .nan}\n" + AGENTS, 1, "timeout_s must be"),
    "endless time": ("defaults: {timeout_s: .inf}\n" + AGENTS, 1, "timeout_s must be"),
    "truth for a number": ("defaults: {timeout_s: true}\n" + AGENTS, 1, "not true"),
    "unknown failure policy": ("on_failure: dorp\n" + AGENTS, 1, "Did you mean 'drop'"),
    "unknown exit policy": (
        "early_exit: {policy: papre}\n" + AGENTS,
        1,
        "Did you mean 'paper'",
    ),
    "early exit of the wrong kind": (
        "early_exit: 5\n" + AGENTS,
        1,
        "a mapping or on or off, not 5",
    ),
    "tau out of bounds": (
        "early_exit: {tau: 1.5}\n" + AGENTS,
        1,
        "early_exit.tau must be .*not 1.5",
    ),
    "skipping an aggregator without complete outputs": (
        "early_exit: {policy: threshold, skip_aggregation: on}\n" + AGENTS,
        1,
        "skip_aggregation goes with policy .*, which reads what outputs say, not 'threshold'",
    ),
    "skipping an aggregator by layers": (
        "early_exit: {policy: in_flight, scope: layer, skip_aggregation: on}\n" + AGENTS,
        1,
        "skip_aggregation goes with scope cluster",
    ),
    "two scopes": (
        AGENTS + "clusters: {x: {agents: [a, b]}}\nearly_exit: {scope: layer}\n",
        6,
        "'clusters' says which agents are judged together",
    ),
    "a vote of one": (
        "agents:\n  a: {model: m}\n  b:\n    vote: majority\n    precursors: [a]\n",
        4,
        "fewer than two",
    ),
    "a vote of one in a tree": (
        "tree:\n  models: [m]\n  shape: [1, 1]\n  root: {vote: majority}\n",
        3,
        "'root' votes, but reads fewer",
    ),
    "a judge that does not read all others": (
        "agents:\n  a: &m {model: m}\n  b: *m\n  j: {model: m, precursors: [a]}\n"
        "  d:\n    vote: judge\n    precursors: [a, b, j]\n",
        6,
        "'j' is the judge of 'd', but does not read just the others",
    ),
    "a judge that reads more than the others": (
        "agents:\n  a: &m {model: m}\n  b: *m\n  j: {model: m, precursors: [a, b]}\n"
        "  d:\n    vote: judge\n    precursors: [a, j]\n",
        6,
        "does not read just the others",
    ),
    "a judge that votes": (
        "agents:\n  a: &m {model: m}\n  b: *m\n  j: {vote: majority, precursors: [a, b]}\n"
        "  d:\n    vote: judge\n    precursors: [a, b, j]\n",
        6,
        "'j' is the judge of 'd'",
    ),
    "a judge in a tree": (
        "tree:\n  models: [m]\n  shape: [3, 1]\n  root: {vote: judge}\n",
        3,
        "'proposer-3' is the judge of 'root'",
    ),
    "a vote with a model": (
        AGENTS + "  d: {vote: majority, precursors: [a, c], model: m}\n",
        5,
        "agents.d votes and asks no model, so it cannot have 'model'",
    ),
    "a vote with a prompt": (
        "tree:\n  shape: [2, 1]\n  models: [m]\n  root: {vote: majority, prompt: {suffix: x}}\n",
        4,
        "tree.root votes .*cannot have 'prompt'",
    ),
    "a voting root with a model": (
        "tree:\n  shape: [2, 1]\n  models: [m]\n  root_model: m\n  root: {vote: majority}\n",
        4,
        "The root votes",
    ),
    "an unknown vote": (
        "tree: {shape: [2, 1], models: [m], root: {vote: most}}\n",
        1,
        "must be 'majority'",
    ),
    "part of an output": (
        "early_exit: {min_completed: 1.5}\n" + AGENTS,
        1,
        "a whole number at least 1, not 1.5",
    ),
    "no chunk": ("prefill: {chunk_tokens: 0}\n" + AGENTS, 1, "prefill.chunk_tokens must be"),
    "unknown chunk": ("prefill: {chunk_tokens: often}\n" + AGENTS, 1, "'adaptive', not 'often'"),
    "a chunk of nothing": ("prefill:\n  chunk_tokens: 0\n" + AGENTS, 2, "at least 1"),
    "uneven layers": (
        "tree:\n  shape: [9, 4, 1]\n  models: [m]\n",
        2,
        "cannot be shared out evenly among 4",
    ),
    "growing layers": ("tree:\n  shape: [2, 4, 1]\n  models: [m]\n", 2, "cannot be shared out"),
    "no single root": (
        "all_to_all:\n  shape: [3, 3]\n  models: [m]\n",
        2,
        "last layer of shape .* is not 1",
    ),
    "one layer": (
        "tree: {shape: [1], models: [m]}\n",
        1,
        "a list of 2 to 32 items, not a list of 1",
    ),
    "empty layer": ("tree: {shape: [0, 1], models: [m]}\n", 1, "at least 1"),
    "shape of words": ("tree: {shape: [three, 1], models: [m]}\n", 1, "not 'three'"),
    "huge layers": ("all_to_all: {shape: [1000, 1000, 1], models: [m]}\n", 1, "hold 2001 agents"),
    "huge number": (
        "tree: {shape: [99999999999999999999, 1], models: [m]}\n",
        1,
        "must be a whole number below 2",
    ),
    "no models": (
        "tree: {shape: [2, 1], models: []}\n",
        1,
        "models must be a list of 1 or more items",
    ),
    "models forgotten": ("tree: {shape: [2, 1]}\n", 1, "tree lacks 'models'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_problems_name_file_line_and_remedy(case: str) -> None:
    text, line, message = WRONG[case]
    with pytest.raises(TopologyError) as error:
        parse_topology(text, source="wrong.yaml", models=["m"])
    assert str(error.value).startswith(f"wrong.yaml:{line}: ")
    assert error.value.remedy
    assert error.match(message)


def test_a_cycle_is_shown() -> None:
    text = "agents:\n" + "".join(
        f"  {agent}: {{model: m, precursors: [{precursors}]}}\n"
        for agent, precursors in (("a", "c"), ("b", "a"), ("c", "b"), ("root", "c"))
    )
    with pytest.raises(
        TopologyError, match=r"in a circle: (a -> b -> c -> a|b -> c -> a -> b|c -> a -> b -> c)\."
    ):
        parse_topology(text, source="f.yaml")


def test_all_problems_of_a_file_are_reported_together() -> None:
    text = (
        "nam: x\nearly_exit: {tau: 2}\nagents:\n  a: {model: m, prompt: {prefix: '{x}'}, "
        "timeout_s: -1}\n"
    )
    with pytest.raises(TopologyError) as error:
        parse_topology(text, source="f.yaml")
    assert [line.split(" ")[0] for line in str(error.value).splitlines()] == [
        "f.yaml:1:",
        "f.yaml:2:",
        "f.yaml:4:",
        "f.yaml:4:",
    ]


def test_a_file_name_that_cannot_be_a_name_asks_for_one() -> None:
    with pytest.raises(
        TopologyError, match=r"'my tree', cannot be the topology's name\. Add 'name'"
    ):
        parse_topology(AGENTS, source="my tree.yaml")
    assert parse_topology("name: fine\n" + AGENTS, source="my tree.yaml").name == "fine"


@pytest.mark.parametrize("key", OF_STEPS)
def test_no_key_of_agents_goes_with_a_vote_or_with_a_steps_topology(key: str) -> None:
    block = {"vote": "majority", "topology": "x", key: None}
    file = {"agents": {"a": block}}
    wrong = [
        problem.message for problem in form_problems(file) if problem.at == ("agents", "a", key)
    ]
    assert len(wrong) == 2
