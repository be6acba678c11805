"""From a topology's prompt templates and a client's chat to one agent's prompt with holes."""

from collections.abc import Mapping, Sequence

from shell_router.core.model import ServedModel
from shell_router.execution.prompt import Message, Part, Slot, render
from shell_router.topology import Agent
from shell_router.topology.graph import own_name
from shell_router.topology.prompting import fill_text, slot_parts


def agent_parts(
    agent: Agent, order: Sequence[str], model: ServedModel, chat: Sequence[Mapping[str, str]]
) -> tuple[Part, ...]:
    """S = prefix, o1, o2, ..., suffix (Faster-MoA, 2.1) as the last user message of the client's chat.

    `order` is the agent's precursors as they shall stand in the prompt, behind the outputs that it is given. System
    messages of the agent and of the client become one, the agent's first; earlier turns stay as they are.
    """
    question = chat[-1]["content"]
    system = [fill_text(agent.prompt.system, question)] if agent.prompt.system else []
    system += [turn["content"] for turn in chat[:-1] if turn["role"] == "system"]
    earlier = [Message(turn["role"], (turn["content"],)) for turn in chat[:-1] if turn["role"] != "system"]
    slots = [
        Slot(name, *slot_parts(agent.prompt.slot, own_name(name), i))
        for i, name in enumerate([*(writer for writer, _ in agent.given), *order], 1)
    ]
    given = [f"{slot.before}{output}{slot.after}" for slot, (_, output) in zip(slots, agent.given, strict=False)]
    open_slots = slots[len(agent.given) :]
    before, behind = (fill_text(text, question) for text in (agent.prompt.prefix, agent.prompt.suffix))
    user = Message("user", (before, *given, *open_slots, behind))
    first = [Message("system", ("\n\n".join(system),))] if system else []
    return render(model.tokenizer, [*first, *earlier, user])
