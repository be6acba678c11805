"""Any steps, whatever their outputs: the way taken is the one that reading the rules by hand
gives."""

import asyncio
from collections.abc import Mapping

import yaml
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.events import AgentTokens, StepChosen
from shell_router.topology import Conditional
from tests.fakes.moa import Recorder, ScriptedMoa, ask
from tests.fakes.topologies import parse_steps

WORDS = ("alpha", "beta", "gamma")
Rules = list[tuple[str, str]]
"""Per rule the word that it looks for in the output, empty for none, and where it leads."""


@st.composite
def ways(draw: st.DrawFn) -> Mapping[str, Rules]:
    """Rules per step; each step leads to later ones or the end, and every step but the first is led
    to.
    """
    size = draw(st.integers(1, 6))
    names = [f"s{number}" for number in range(size)]
    rules: dict[str, Rules] = {name: [] for name in names}
    for position in range(1, size):
        before = names[draw(st.integers(0, position - 1))]
        rules[before].append((draw(st.sampled_from(WORDS)), names[position]))
    for name in names:
        rules[name] = draw(st.permutations(rules[name]))
        if draw(st.booleans()):
            rules[name] = [
                *rules[name],
                ("", draw(st.sampled_from([*names[names.index(name) + 1 :], "end"]))),
            ]
    return rules


def topology(rules: Mapping[str, Rules]) -> Conditional:
    steps = {
        name: {
            "model": "small",
            "then": [rule(word, go) for word, go in own] or "end",
            "precursors": earlier(name, rules),
        }
        for name, own in rules.items()
    }
    file = {"name": "walk", "start": "s0", "steps": steps}
    return parse_steps(yaml.safe_dump(file, sort_keys=False), source="walk.yaml")


def earlier(name: str, rules: Mapping[str, Rules]) -> list[str]:
    """All steps from which a way leads to it."""
    found: set[str] = set()
    for step in sorted(rules, reverse=True):
        if any(go == name or go in found for _, go in rules[step]):
            found.add(step)
    return sorted(found)


def rule(word: str, go: str) -> dict[str, object]:
    return {"when": {"matches": word}, "go": go} if word else {"go": go}


def by_hand(rules: Mapping[str, Rules], outputs: Mapping[str, str]) -> list[str]:
    taken, step = [], "s0"
    while step != "end":
        taken.append(step)
        step = next((go for word, go in rules[step] if word in outputs[step]), "end")
    return taken


@given(ways(), st.data())
def test_the_way_taken_its_usage_and_its_stream_are_those_of_the_rules(
    rules: Mapping[str, Rules], data: st.DataObject
) -> None:
    words = st.lists(st.sampled_from((*WORDS, "else")), min_size=1, max_size=3).map(" ".join)
    outputs = {step: data.draw(words) for step in rules}
    expected = by_hand(rules, outputs)
    moa, events, graph = ScriptedMoa(outputs), Recorder(), topology(rules)
    answer = asyncio.run(moa.executor.run(graph, ask("So?"), events.emit))
    assert list(answer.agents) == expected
    assert answer.text == outputs[expected[-1]] == streamed(events, graph)
    assert [event.step for event in events.of(StepChosen)] == [*expected, "end"]
    read = moa.prompt_of(expected[-1])
    assert all(
        f"Draft {place}:\n{outputs[step]}" in read
        for place, step in enumerate(before(expected, graph), 1)
    )
    assert not moa.running and len(moa.cache) == 0


def before(taken: list[str], graph: Conditional) -> list[str]:
    """Whom the last step reads: of its precursors those that ran."""
    return [step for step in graph.steps[taken[-1]].reads if step in taken]


def streamed(events: Recorder, graph: Conditional) -> str:
    """What a client that streams is sent."""
    live = [event.text for event in events.of(AgentTokens) if event.agent in graph.answering]
    return "".join([*live, *(event.text for event in events.of(StepChosen))])
