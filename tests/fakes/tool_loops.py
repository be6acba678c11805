"""Models whose root calls a tool in each step of a loop but the last."""

from shell_router.core.engine import Generation
from tests.fakes.moa import ScriptedMoa, agent_of
from tests.fakes.scripted_engine import Script

CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
ANSWER = "It is dry."


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


def ran(moa: ScriptedMoa) -> int:
    """The agents that ran."""
    return sum(len(engine.generated) for engine in moa.engines.values())
