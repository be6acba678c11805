"""Models that call a tool in each step of a loop but the last."""

from typing import Any

from shell_router.core.engine import Generation
from shell_router.topology import parse_topology
from tests.fakes.moa import ScriptedMoa, agent_of
from tests.fakes.scripted_engine import Script

CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
ANSWER = "It is dry."
CALLERS = parse_topology(
    "name: tree-9-3-1\n"
    "tree: {shape: [2, 1], models: [small, medium, large], proposer: {tools: on}}",
    source="callers.yaml",
)


def calling(moa: ScriptedMoa | None = None) -> ScriptedMoa:
    """Models whose roots call `look` until they have seen four results."""
    moa = moa or ScriptedMoa(call_mark="<tool_call>")
    large = moa.engines["large"]
    others = large.answer

    def answer(request: Generation) -> Script:
        if agent_of(request) != "root":
            return others(request)
        prompt = moa.tokenizers["large"].decode(request.input_ids)
        return Script(ANSWER if prompt.count("seen ") == 4 else CALL)

    large.answer = answer
    return moa


def calling_below(moa: ScriptedMoa | None = None) -> ScriptedMoa:
    """Models whose agents, and then whose root, call `look` once."""
    moa = moa or ScriptedMoa(call_mark="<tool_call>")
    for alias, engine in moa.engines.items():

        def answer(request: Any, alias: str = alias) -> Script:
            prompt = moa.tokenizers[alias].decode(request.input_ids)
            if "seen" not in prompt:
                return Script(CALL)
            return Script(ANSWER if agent_of(request) == "root" else "I have looked.")

        engine.answer = answer
    return moa


def ran(moa: ScriptedMoa) -> int:
    """The agents that ran."""
    return sum(len(engine.generated) for engine in moa.engines.values())
