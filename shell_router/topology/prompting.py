"""Prompt templates: their placeholders, the defaults, and filling them (Faster-MoA, 2.1).

Templates use the braces of `str.format` and nothing else of it: a placeholder is a bare name; `{{`
and `}}` are braces meant as text. What is put in is never scanned again, so a question may hold any
braces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from string import Formatter
from typing import Annotated

from pydantic import AfterValidator

from shell_router.errors import SettingError

_BRACES = "Write {{ and }} for braces that are meant as text."


def template_pieces(template: str) -> list[tuple[str, str | None]]:
    """Split `template` into texts and the placeholder that follows each, None where none does.

    Raises:
        ValueError: Braces are unmatched, or a placeholder has a conversion or a format.
    """
    pieces: list[tuple[str, str | None]] = []
    for text, name, spec, conversion in Formatter().parse(template):
        if spec or conversion:
            raise ValueError(f"placeholder {{{name}}} carries a conversion or a format")
        pieces.append((text, name))
    return pieces


def _require_placeholders(template: str, known: tuple[str, ...], once: str = "") -> str:
    """Require that only `known` placeholders stand in a template, and `once` exactly one time."""
    try:
        names = [name for _, name in template_pieces(template) if name is not None]
    except ValueError as error:
        raise SettingError(str(error), remedy=_BRACES) from None
    for name in names:
        if name not in known:
            remedy = f"Known here: {', '.join(f'{{{each}}}' for each in known)}. {_BRACES}"
            raise SettingError(f"unknown placeholder {{{name}}}", remedy=remedy)
    if once and names.count(once) != 1:
        wrong = f"it holds {{{once}}} {names.count(once)} times"
        raise SettingError(wrong, remedy=f"Write {{{once}}} exactly once.")
    return template


_TEXT = Annotated[str, AfterValidator(partial(_require_placeholders, known=("question",)))]
_SLOT = Annotated[
    str,
    AfterValidator(
        partial(_require_placeholders, known=("output", "agent", "index"), once="output")
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
    suffix: Annotated[
        _TEXT, "Text after the slots. It cannot be prefilled early, so keep it short."
    ] = ""


PROPOSER = Prompt()
"""The default prompt of an agent without precursors."""

AGGREGATOR = Prompt(
    prefix=(
        "Several assistants have each drafted an answer to the question below. A draft may be "
        "wrong, incomplete "
        "or cut short. Check their reasoning, keep what is sound, correct what is not, and write "
        "one complete "
        "answer that stands on its own.\n\nQuestion:\n{question}"
    ),
    slot="\n\nDraft {index}:\n{output}",
    suffix="\n\nNow your answer:",
)
"""The default prompt of an agent with precursors. The suffix is short: it cannot be prefilled
early.
"""


def fill_text(template: str, question: str) -> str:
    """Fill a system text, prefix or suffix.

    Raises:
        ValueError: The template has another placeholder than `{question}`.
    """
    return _fill(template_pieces(template), {"question": question})


def slot_parts(template: str, agent: str, index: int) -> tuple[str, str]:
    """Return the texts before and after the output in the slot of precursor `agent`.

    Args:
        template: The slot's template, which holds `{output}` once.
        agent: The precursor's id, for `{agent}`.
        index: Its number in the prompt, from 1, for `{index}`.

    Raises:
        ValueError: The template holds no `{output}`, several, or an unknown placeholder.
    """
    pieces = template_pieces(template)
    names = [name for _, name in pieces]
    if names.count("output") != 1:
        raise ValueError(f"a slot holds {{output}} exactly once, not as in {template!r}")
    at = names.index("output")
    values = {"agent": agent, "index": str(index)}
    before = _fill([*pieces[:at], (pieces[at][0], None)], values)
    return before, _fill(pieces[at + 1 :], values)


def _fill(pieces: list[tuple[str, str | None]], values: Mapping[str, str]) -> str:
    unknown = {name for _, name in pieces if name is not None} - values.keys()
    if unknown:
        raise ValueError(f"unknown placeholder {{{min(unknown)}}}; known here: {', '.join(values)}")
    return "".join(text + (values[name] if name is not None else "") for text, name in pieces)
