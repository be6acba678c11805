"""Marks in models' outputs: around thinking, and before tool calls."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around a model's thinking.

    With `always` a model thinks first even if it writes no `start`.
    """

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False


_OPTIONAL = ReasoningMarks()
_ALWAYS = ReasoningMarks(always=True)
REASONING_PARSERS: Mapping[str, ReasoningMarks] = {
    "deepseek-r1": _ALWAYS,
    "deepseek-v3": _OPTIONAL,
    "glm45": _OPTIONAL,
    "interns1": _OPTIONAL,
    "kimi": ReasoningMarks("◁think▷", "◁/think▷"),
    "kimi_k2": _OPTIONAL,
    "mimo": _OPTIONAL,
    "minimax": _ALWAYS,
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "nemotron_3": _OPTIONAL,
    "qwen3": _OPTIONAL,
    "qwen3-thinking": _ALWAYS,
    "step3": _ALWAYS,
}
"""Marks by SGLang's names of `--reasoning-parser`, for parsers that look for thinking between two
texts.
"""


CALL_MARKS: Mapping[str, str] = {
    "hermes": "<tool_call>",
    "qwen": "<tool_call>",
    "qwen25": "<tool_call>",
}
"""Marks that begin a call, by SGLang's names of `--tool-call-parser`, for parsers whose calls are
JSON between two such marks.
"""
WRITTEN_CALL = re.compile(r'<tool_call>\s*\{\s*"name"')
"""A call in the format of CALL_MARKS, as chat templates write it."""
PARSER_MARKS: Mapping[str, str] = {
    **CALL_MARKS,
    **dict.fromkeys(("deepseekv3", "deepseekv31"), "<｜tool▁calls▁begin｜>"),
    **dict.fromkeys(("glm", "glm45", "glm47"), "<tool_call>"),
    "mistral": "[TOOL_CALLS]",
}
"""CALL_MARKS, and the marks of parsers that only SGLang runs. With a parser that is missing here a
call may begin anywhere.
"""


class ReasoningSplit:
    """Separates an output's thinking from its answer, however the output is cut into pieces.

    White space at the beginning of either is dropped, as are the marks.

    Args:
        marks: The marks around thinking.
        prompt_end: The end of the prompt's text, because templates may write a mark there
            themselves.
    """

    def __init__(self, marks: ReasoningMarks, prompt_end: str) -> None:
        self._marks = marks
        self._held = ""
        self._pieces: list[str] = []
        self._begun = False  # something other than white space has come since the stage began
        before = prompt_end.rstrip()
        self.stage: Literal["start", "thinking", "answer"] = "start"
        if before.endswith(marks.start):
            self.stage = "thinking"
        elif before.endswith(marks.end):
            self.stage = "answer"

    @property
    def thought(self) -> str:
        """The thinking as it was written, with the start mark and without the end mark."""
        return "".join(self._pieces)

    @property
    def passes(self) -> bool:
        """Whether all further text is answer, unchanged."""
        return self.stage == "answer" and self._begun

    def feed(self, text: str) -> tuple[str, str]:
        """Take in text; return the (thinking, answer) that are certain now."""
        text = self._held + text
        self._held = ""
        if self.stage == "start":
            text = self._start(text)
        if self.stage != "thinking":
            return "", self._strip_start(text)
        at = text.find(self._marks.end)
        if at >= 0:
            thinking = self._take_thinking(text[:at])
            self.stage = "answer"
            self._begun = False
            return thinking, self._strip_start(text[at + len(self._marks.end) :])
        kept = next(
            n for n in range(len(self._marks.end) - 1, -1, -1) if text.endswith(self._marks.end[:n])
        )
        self._held = text[len(text) - kept :]
        return self._take_thinking(text[: len(text) - kept]), ""

    def finish(self) -> tuple[str, str]:
        """End the output; return the (thinking, answer) that was held back."""
        held = self._held
        self._held = ""
        if self.stage == "start":
            if self._marks.always:
                self.stage = "thinking"
            else:
                self.stage = "answer"
        if self.stage == "thinking":
            return (self._take_thinking(held), "")
        return ("", self._strip_start(held))

    def _start(self, text: str) -> str:
        """Decide whether thinking comes first; return the text after a start mark."""
        stripped = text.lstrip()
        start = self._marks.start
        if stripped.startswith(start):
            self.stage = "thinking"
            self._pieces.append(start)
            return stripped[len(start) :]
        if start.startswith(stripped):
            self._held = text
            return ""
        if self._marks.always:
            self.stage = "thinking"
        else:
            self.stage = "answer"
        return text

    def _take_thinking(self, text: str) -> str:
        self._pieces.append(text)
        return self._strip_start(text)

    def _strip_start(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text
