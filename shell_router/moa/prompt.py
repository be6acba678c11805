"""Prompts with slots: rendered once, filled while other agents write, tokenized piece by piece."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, count
from typing import TypeVar

from shell_router.core.control_text import ControlText
from shell_router.core.engine import NO_OPTIONS, ServedModel, Tokenizer, value
from shell_router.core.exact_json import NewValues, Values
from shell_router.moa.requests import find_question
from shell_router.topology import Agent
from shell_router.topology.prompting import fill_text, slot_parts

LONG_TEXT = 4096
"""Characters; tokenizing more takes milliseconds, so it is done off the event loop."""

CHARACTERS_PER_TOKEN = 4
"""An estimate for texts whose ids are not known."""
CUT_MARK = " …"
"""Stands for the rest of an output that a slot does not take."""

T = TypeVar("T")

# a pool of its own: long prompts must not starve file I/O in asyncio's default executor
_POOL = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2), thread_name_prefix="tokenize")


async def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of `text`; long texts are tokenized on a thread."""
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text)
    return await run_off_loop(len(text), partial(tokenizer.encode, text))


async def run_off_loop(characters: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs on a thread if it has many `characters` to read."""
    if characters < LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_POOL, work)


@value
class Slot:
    """A place in a prompt for one agent's output, with the text written around it.

    It takes `most_tokens` of the output, then CUT_MARK.
    """

    agent: str
    before: str = ""
    after: str = ""
    most_tokens: int | None = None


Part = str | Slot

Turn = Values
"""A chat message as the client sends it."""

PromptMark = tuple[int, str, str]
"""A position in a growing prompt: the number of decided ids, the text after them, and the output
behind it.
"""


@value
class Message:
    """A chat message whose content may have slots."""

    role: str
    parts: tuple[Part, ...]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message | Turn],
    options: Values = NO_OPTIONS,
    tools: Sequence[Turn] = (),
) -> tuple[Part, ...]:
    """Put messages through the chat template and find their slots again.

    Each slot goes through the template as a mark that occurs in no message. The template may move
    content about, but the text around a slot is what the template made of it.
    """
    mark = find_unused_mark(_list_texts(messages, options, tools))
    slots: list[Slot] = []
    chat = [_mark_slots(message, mark, slots) for message in messages]
    pieces = tokenizer.render_chat(chat, tools, options).split(mark)
    parts: list[Part] = []
    for index, piece in enumerate(pieces):
        if index % 2:
            parts.append(slots[int(piece)])
        elif piece:
            parts.append(piece)
    return tuple(parts)


def _list_texts(
    messages: Sequence[Message | Turn], options: Values, tools: Sequence[Turn]
) -> list[str]:
    """List all texts that reach the chat template."""
    texts = []
    for message in (*messages, *tools, options):
        if isinstance(message, Message):
            # a space stands for each slot, so that texts around it do not touch
            pieces = [part if isinstance(part, str) else " " for part in message.parts]
            texts.append("".join(pieces))
        elif message:
            texts.append(json.dumps(message, ensure_ascii=False, default=str))
    return texts


def _mark_slots(message: Message | Turn, mark: str, slots: list[Slot]) -> Turn:
    """Return the message with a numbered mark for each slot, which is appended to `slots`."""
    if not isinstance(message, Message):
        return message
    content = ""
    for part in message.parts:
        if isinstance(part, Slot):
            content += f"{mark}{len(slots)}{mark}"
            slots.append(part)
        else:
            content += part
    return {"role": message.role, "content": content}


def find_unused_mark(texts: Sequence[str]) -> str:
    """Return a string of private-use characters, unknown to templates, that is in no text."""
    used = {number for text in texts for number in _MARK.findall(text)}
    return next(f"\ue000{number}\ue001" for number in count() if str(number) not in used)


_MARK = re.compile("\ue000([0-9]+)\ue001")


@value
class AgentPrompt:
    """An agent's prompt: its messages, and what the chat template makes of them."""

    parts: tuple[Part, ...]
    messages: Sequence[Message | Turn]


def describe_messages(
    messages: Sequence[Message | Turn], known: Mapping[str, str]
) -> list[NewValues]:
    """Return the messages as traces hold them.

    An output that the prompt had from the start is a text of its own. A slot names its agent and
    has the texts around it, unless the agent's output is `known`.
    """
    described: list[NewValues] = []
    for message in messages:
        if not isinstance(message, Message):
            described.append({**message})
            continue
        content = chain.from_iterable(_describe_part(part, known) for part in message.parts)
        described.append({"role": message.role, "content": list(filter(None, content))})
    return described


def _describe_part(part: Part, known: Mapping[str, str]) -> list[str | NewValues]:
    if isinstance(part, str):
        return [part]
    if part.agent in known:
        return [part.before, known[part.agent], part.after]
    return [{"output_of": part.agent, "before": part.before, "after": part.after}]


class GrowingPrompt:
    """Token ids of a prompt that is still being written.

    Text is tokenized together with all text it touches, so a run of text between two outputs in
    token mode has the ids it would have on its own. Output ids are taken as they are, but for
    control tokens. The final ids therefore depend on what was added, never on how it was cut or
    when it came.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._output: list[str] = []

    def add_text(self, text: str) -> None:
        """Append text of the topology or the client."""
        if text:
            self._texts = [self._join(), text]
            self._output.clear()

    def add_output(self, text: str) -> None:
        """Append text that an agent wrote, none of which becomes a control token."""
        self._output.append(text)

    def _join(self) -> str:
        """Return the text whose ids are not decided."""
        output = self._tokenizer.control.quote("".join(self._output))
        return "".join([*self._texts, output])

    def add_ids(self, ids: Sequence[int]) -> None:
        """Append ids that another model with this tokenizer wrote; no ids change nothing."""
        if ids:
            self._ids.extend(self._tokenizer.encode(self._join()))
            self._texts.clear()
            self._output.clear()
            self._ids.extend(self._tokenizer.control.replace_ids(ids))

    @property
    def undecided(self) -> int:
        """The number of characters at the end whose ids are not decided."""
        return sum(map(len, self._texts)) + sum(map(len, self._output))

    def encode_stable_part(self) -> list[int]:
        """Return the ids that nothing added later is expected to change."""
        return self._append_ids(self._tokenizer.encode_stable)

    def encode_all(self) -> list[int]:
        """Return the ids if nothing more is added."""
        return self._append_ids(self._tokenizer.encode)

    def _append_ids(self, encode: Callable[[str], list[int]]) -> list[int]:
        text = self._join()
        return [*self._ids, *encode(text)] if text else self._ids.copy()

    def mark(self) -> PromptMark:
        """Return the current position."""
        return len(self._ids), "".join(self._texts), "".join(self._output)

    def rewind(self, mark: PromptMark) -> None:
        """Forget all that was added since `mark`."""
        decided, text, output = mark
        del self._ids[decided:]
        self._texts = [text]
        self._output = [output]


def render_agent_prompt(
    agent: Agent,
    order: Sequence[str],
    model: ServedModel,
    chat: Sequence[Turn],
    options: Values = NO_OPTIONS,
    tools: Sequence[Turn] | None = None,
) -> AgentPrompt:
    """Render S = prefix, o1, o2, ..., suffix (Faster-MoA, 2.1) in place of the client's question.

    The agent's system message and a first one of the client become one, the agent's first; other
    turns stay as they are.

    Args:
        agent: The agent whose templates are filled.
        order: Its precursors in the order of their slots, after the outputs it already has.
        model: The model whose chat template is used.
        chat: The client's messages.
        options: Further variables of the chat template.
        tools: The tools offered to the model. With None, calls and results become text.
    """
    control = model.tokenizer.control
    chat = [
        {**turn, "content": control.quote(turn["content"])} if turn["role"] == "tool" else turn
        for turn in chat
    ]
    at = find_question(chat)
    question = chat[at]["content"]
    earlier: Sequence[Turn] = chat[:at]
    later: Sequence[Turn] = chat[at + 1 :]
    if tools is None:
        earlier = write_out_tools(earlier, control)
        later = write_out_tools(later, control)
    turns = _add_system(agent.prompt.system, question, earlier)
    before, after = _fill_around_slots(agent, question)
    if not order and not agent.given:
        content = f"{before}{after}" if after else before
        turns = [*turns, {"role": "user", "content": content}, *later]
        text = model.tokenizer.render_chat(turns, tools or (), options)
        return AgentPrompt((text,) if text else (), turns)
    user = Message("user", (before, *_fill_slots(agent, order, control), after))
    messages: list[Message | Turn] = [*turns, user, *later]
    return AgentPrompt(render(model.tokenizer, messages, options, tools or ()), messages)


def _add_system(template: str, question: str, turns: Sequence[Turn]) -> Sequence[Turn]:
    """Return the turns behind the filled `template`, which their first system message follows."""
    if not template:
        return turns
    system = fill_text(template, question)
    if turns and turns[0]["role"] == "system":
        system += "\n\n" + turns[0]["content"]
        turns = turns[1:]
    return [{"role": "system", "content": system}, *turns]


def _fill_around_slots(agent: Agent, question: str) -> tuple[str, str]:
    """Return the filled prefix and suffix of the agent's prompt."""
    prompt = agent.prompt
    if prompt.prefix == "{question}" and not prompt.suffix:
        return question, ""
    return fill_text(prompt.prefix, question), fill_text(prompt.suffix, question)


def _fill_slots(agent: Agent, order: Sequence[str], control: ControlText) -> list[Part]:
    """Return the filled slots of outputs that the agent already has, then the open slots."""
    parts: list[Part] = []
    writers = [writer for writer, _ in agent.given]
    for index, writer in enumerate([*writers, *order]):
        # the id as its own file has it, without the step it runs in
        name = writer.rpartition("/")[2]
        template = agent.prompt.slots.get(name, agent.prompt.slot)
        before, after = slot_parts(template, name, index + 1)
        most = agent.prompt.slot_tokens
        if index < len(agent.given):
            output = agent.given[index][1]
            if most is not None and len(output) > most * CHARACTERS_PER_TOKEN:
                output = output[: most * CHARACTERS_PER_TOKEN] + CUT_MARK
            parts += [before, control.quote(output), after]
        else:
            parts.append(Slot(writer, before, after, most))
    return parts


def write_out_tools(chat: Sequence[Turn], control: ControlText) -> Sequence[Turn]:
    """Return the chat with tool calls and results as text, for agents that have no tools.

    Results that follow each other become one user message, so that user and assistant still take
    turns.
    """
    if not any(turn["role"] == "tool" or turn.get("tool_calls") for turn in chat):
        return chat
    turns: list[NewValues] = []
    names: dict[str, str] = {}
    follows_result = False
    for turn in chat:
        content = turn["content"]
        is_result = turn["role"] == "tool"
        if is_result:
            result = f"{names.get(turn['tool_call_id'], 'The tool')} returned: {content}"
            if follows_result:
                turns[-1]["content"] += f"\n{result}"
            else:
                turns.append({"role": "user", "content": result})
        else:
            calls = turn.get("tool_calls") or ()
            names |= {call["id"]: call["function"]["name"] for call in calls}
            if calls:
                written = [control.quote(_write_out_call(call)) for call in calls]
                content = "\n".join(filter(None, [content, *written]))
            turns.append({"role": turn["role"], "content": content})
        follows_result = is_result
    return turns


def _write_out_call(call: Values) -> str:
    function = call["function"]
    return f"I call {function['name']} with {json.dumps(function['arguments'])}"
