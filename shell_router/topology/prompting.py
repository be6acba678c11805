"""Prompt templates: their placeholders, the defaults, and filling them (Faster-MoA, 2.1).

Templates use the braces of `str.format` and nothing else of it: a placeholder is a bare name; `{{`
and `}}` are braces meant as text. What is put in is never scanned again, so a question may hold any
braces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from string import Formatter
from typing import Annotated

from annotated_types import Ge
from pydantic import AfterValidator

from shell_router.errors import SettingError

_BRACES = "Write {{ and }} for braces that are meant as text."


def _require_placeholders(template: str, allowed: tuple[str, ...], once: str = "") -> str:
    """Require that only `allowed` placeholders stand in a template, and `once` exactly one time."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise SettingError(str(error), remedy=_BRACES) from None
    names: list[str] = []
    for _, name, spec, conversion in pieces:
        if spec or conversion:
            wrong = f"placeholder {{{name}}} carries a conversion or a format"
            raise SettingError(wrong, remedy=_BRACES)
        if name is None:
            continue
        names.append(name)
        if name not in allowed:
            remedy = f"Known here: {', '.join(f'{{{each}}}' for each in allowed)}. {_BRACES}"
            raise SettingError(f"unknown placeholder {{{name}}}", remedy=remedy)
    for name in set(allowed).difference(names):
        if f"{{{{{name}}}}}" in template:
            raise SettingError(f"{{{{{name}}}}} is text", remedy=f"Write {{{name}}}.")
    if once and names.count(once) != 1:
        wrong = f"it holds {{{once}}} {names.count(once)} times"
        raise SettingError(wrong, remedy=f"Write {{{once}}} exactly once.")
    return template


_TEXT = Annotated[str, AfterValidator(partial(_require_placeholders, allowed=("question",)))]
_SLOT = Annotated[
    str,
    AfterValidator(
        partial(_require_placeholders, allowed=("output", "agent", "index"), once="output")
    ),
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt: prefix, a slot per precursor, suffix. Parts left out keep their defaults.

    In the paper's terms a prompt is S = prefix, o1, o2, ..., suffix (Faster-MoA, 2.1). `index`
    counts from 1 in prompt order. The slot of a precursor that was cut off or dropped is left out.
    """

    system: Annotated[_TEXT, "System message; empty for none. May hold {question}."] = ""
    prefix: Annotated[
        _TEXT, "Text before the slots; prefilled at once. {question} is the user's text."
    ] = "{question}"
    slot: Annotated[
        _SLOT,
        "Text around a precursor's {output}; may also hold {agent}, its id, and {index}, from 1.",
    ] = "{output}"
    slots: Annotated[
        Mapping[str, _SLOT], "Texts of the slots of these precursors, in place of `slot`."
    ] = field(default_factory=dict, hash=False)
    slot_tokens: Annotated[
        int | None,
        Ge(1),
        "The most tokens that a slot takes of its output; what follows is left out, and … says so.",
    ] = None
    suffix: Annotated[
        _TEXT, "Text after the slots. It cannot be prefilled early, so keep it short."
    ] = ""


PROPOSER = Prompt()
"""The default prompt of an agent without precursors."""

AGGREGATOR = Prompt(
    prefix="Several assistants have each drafted an answer to the question below. A draft may be "
    "wrong, incomplete or cut short. Check their reasoning, keep what is sound, correct what "
    "is not, and write one complete answer that stands on its own.\n\nQuestion:\n{question}",
    slot="\n\nDraft {index}:\n{output}",
    suffix="\n\nNow your answer:",
)
"""The default prompt of an agent with precursors. The suffix is short: it cannot be prefilled
early.
"""


def fill_text(template: str, question: str) -> str:
    """Fill a system text, prefix or suffix."""
    return template.format(question=question)


def slot_parts(template: str, agent: str, index: int) -> tuple[str, str]:
    """Return the texts before and after the output in the slot of precursor `agent`.

    Args:
        template: The slot's template, which holds `{output}` once.
        agent: The precursor's id, for `{agent}`.
        index: Its number in the prompt, from 1, for `{index}`.
    """
    values = {"agent": agent, "index": str(index)}
    parts = [""]
    for text, name, _, _ in Formatter().parse(template):
        parts[-1] += text
        if name == "output":
            parts.append("")
        elif name is not None:
            parts[-1] += values[name]
    before, after = parts
    return before, after
