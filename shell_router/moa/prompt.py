"""Prompts with slots: rendered once, filled while other agents write, tokenized piece by piece."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, TypeVar

from shell_router.core.engine import NO_OPTIONS, ServedModel, Tokenizer, value
from shell_router.moa.requests import place_of_question
from shell_router.topology import Agent
from shell_router.topology.prompting import fill_text, slot_parts

LONG_TEXT = 4096
"""Characters; tokenizing more takes milliseconds, so it is done off the event loop."""

CHARACTERS_PER_TOKEN = 4
"""About, where ids are not known."""


T = TypeVar("T")
_POOL = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2), thread_name_prefix="tokenize")
"""Not asyncio's own threads: as many long prompts as a client sends would keep files from being
read and written.
"""


async def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text`."""
    short = len(text) < LONG_TEXT
    if short:
        return tokenizer.encode(text)
    return await off_loop(len(text), partial(tokenizer.encode, text))


async def off_loop(characters: int, work: Callable[[], T]) -> T:
    """The result of `work`, which takes time in proportion to `characters`: of many in one of a few
    threads.
    """
    if characters < LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_POOL, work)


@value
class Slot:
    """A place that one agent's output fills, with the text written around it."""

    agent: str
    before: str = ""
    after: str = ""


Part = str | Slot

Turn = Mapping[str, Any]
"""A chat message as it is."""

Mark = tuple[int, str]
"""A place in a growing prompt: how many ids were decided, and the text after them."""


@value
class Message:
    """A chat message whose content may have slots."""

    role: str
    parts: tuple[Part, ...]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message | Turn],
    options: Mapping[str, Any] = NO_OPTIONS,
    tools: Sequence[Turn] = (),
) -> tuple[Part, ...]:
    """Put messages through the chat template, with these `options` and `tools`, and find the slots
    again.

    Each slot goes through the template as a mark that occurs in no message, so the template may
    move content about but the text around a slot is what the template made of it.
    """
    written = [message for message in messages if isinstance(message, Message)]
    slots = [part for message in written for part in message.parts if isinstance(part, Slot)]
    texts = [
        "".join(part if isinstance(part, str) else " " for part in message.parts)
        for message in written
    ]
    others = [one for one in (*messages, *tools, options) if one and not isinstance(one, Message)]
    mark = unused_mark(
        [*texts, *(json.dumps(one, ensure_ascii=False, default=str) for one in others)]
    )
    numbers = iter(range(len(slots)))
    chat = [
        message
        if not isinstance(message, Message)
        else {
            "role": message.role,
            "content": "".join(
                part if isinstance(part, str) else f"{mark}{next(numbers)}{mark}"
                for part in message.parts
            ),
        }
        for message in messages
    ]
    pieces = tokenizer.render_chat(chat, tools, options).split(mark)
    found: list[Part] = [slots[int(piece)] if i % 2 else piece for i, piece in enumerate(pieces)]
    return tuple(part for part in found if part != "")


def unused_mark(texts: Sequence[str]) -> str:
    """A string of private-use characters, to which no template gives a meaning, that no text
    holds."""
    used = {number for text in texts for number in _MARK.findall(text)}
    return next(f"\ue000{number}\ue001" for number in count() if str(number) not in used)


_MARK = re.compile("\ue000([0-9]+)\ue001")


class GrowingPrompt:
    """Token ids of a prompt that is still being written.

    Text is tokenized with all text it touches, so a run of text between two outputs in token mode
    has the ids it would have on its own; output ids are taken as they are. The final ids therefore
    depend on what was added, never on how it was cut or when it came.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._texts: list[str] = []

    def add_text(self, text: str) -> None:
        """Append text."""
        self._texts.append(text)

    def add_ids(self, ids: Sequence[int]) -> None:
        """Append ids that another model with this tokenizer wrote; no ids change nothing."""
        if ids:
            self._ids.extend(self._tokenizer.encode("".join(self._texts)))
            self._texts.clear()
            self._ids.extend(ids)

    @property
    def undecided(self) -> int:
        """Characters at its end whose ids are not decided."""
        return sum(map(len, self._texts))

    def stable_ids(self) -> list[int]:
        """The ids that nothing added later is expected to change."""
        return self._with(self._tokenizer.encode_stable)

    def final_ids(self) -> list[int]:
        """The ids if nothing more is added."""
        return self._with(self._tokenizer.encode)

    def _with(self, encode: Callable[[str], list[int]]) -> list[int]:
        if self._texts:
            return [*self._ids, *encode("".join(self._texts))]
        return self._ids.copy()

    def mark(self) -> Mark:
        """How far it has come."""
        return len(self._ids), "".join(self._texts)

    def back_to(self, mark: Mark) -> None:
        """Forget all that was added since."""
        decided, text = mark
        del self._ids[decided:]
        self._texts = [text]


def agent_parts(
    agent: Agent,
    order: Sequence[str],
    model: ServedModel,
    chat: Sequence[Turn],
    options: Mapping[str, Any] = NO_OPTIONS,
    tools: Sequence[Turn] | None = None,
) -> tuple[Part, ...]:
    """S = prefix, o1, o2, ..., suffix (Faster-MoA, 2.1) in place of the last user message of the
    client's chat.

    `order` is the agent's precursors as they shall stand in the prompt, behind the outputs that it
    is given. System messages of the agent and of the client become one, the agent's first; earlier
    turns stay as they are. `options` and `tools` go to the chat template; without tools, even none,
    their calls and results are text.
    """
    if chat[-1]["role"] == "user":
        place = len(chat) - 1
    else:
        place = place_of_question(chat)
    prompt = agent.prompt
    question = chat[place]["content"]
    before_it = chat[:place]
    later = chat[place + 1 :]
    if tools is None:
        before_it = without_tools(before_it)
        later = without_tools(later)
    if prompt.system:
        system = [fill_text(prompt.system, question)]
    else:
        system = []
    earlier = []
    for turn in before_it:
        if turn["role"] == "system":
            system.append(turn["content"])
        else:
            earlier.append(turn)
    if system:
        first = [{"role": "system", "content": "\n\n".join(system)}]
    else:
        first = []
    if prompt.prefix == "{question}" and not prompt.suffix:
        before = question
        behind = ""
    else:
        before = fill_text(prompt.prefix, question)
        behind = fill_text(prompt.suffix, question)
    if not order and not agent.given:
        turns = [*first, *earlier, {"role": "user", "content": before + behind}, *later]
        text = model.tokenizer.render_chat(turns, tools or (), options)
        return (text,) if text else ()
    names = [*(writer for writer, _ in agent.given), *order]
    # ids as their own file has them, without the step they run in
    slots = [
        Slot(name, *slot_parts(prompt.slot, name.rpartition("/")[2], i))
        for i, name in enumerate(names, 1)
    ]
    given = [
        f"{slot.before}{output}{slot.after}"
        for slot, (_, output) in zip(slots, agent.given, strict=False)
    ]
    user = Message("user", (before, *given, *slots[len(agent.given) :], behind))
    return render(model.tokenizer, [*first, *earlier, user, *later], options, tools or ())


def without_tools(chat: Sequence[Turn]) -> Sequence[Turn]:
    """The chat for agents that have no tools, and whose templates may know none: calls and results
    as text.

    Results that follow each other become one user message, so that user and assistant still take
    turns.
    """
    if not any(turn["role"] == "tool" or turn.get("tool_calls") for turn in chat):
        return chat
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for turn in chat:
        if turn["role"] == "tool":
            text = f"{names.get(turn['tool_call_id'], 'The tool')} returned: {turn['content']}"
            if turns and turns[-1].get("results"):
                turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{text}"}
            else:
                turns.append({"role": "user", "content": text, "results": True})
        elif calls := turn.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            called = [
                (
                    f"I call {call['function']['name']} with "
                    f"{json.dumps(call['function']['arguments'])}"
                )
                for call in calls
            ]
            turns.append(
                {
                    "role": turn["role"],
                    "content": "\n".join(filter(None, [turn["content"], *called])),
                }
            )
        else:
            turns.append(turn)
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]
