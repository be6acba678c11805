"""Prompt templates: what they may hold, the defaults, and how they are filled (Faster-MoA, 2.1).

Templates use the braces of `str.format` and nothing else of it: a placeholder is a bare name; `{{`
and `}}` are braces meant as text. What is put in is never scanned again, so a question may hold any
braces it likes.
"""

from collections.abc import Mapping
from string import Formatter

from shell_router.topology.graph import Prompt

PROPOSER = Prompt()
"""What an agent without precursors is asked by default."""

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
"""What an agent with precursors is asked by default. The suffix is short: it cannot be prefilled
early.
"""


def template_pieces(template: str) -> list[tuple[str, str | None]]:
    """Split `template` into texts and the placeholder that follows each, None where none does.

    Raises ValueError for unmatched braces and for a placeholder with a conversion or a format.
    """
    pieces: list[tuple[str, str | None]] = []
    for text, name, spec, conversion in Formatter().parse(template):
        if spec or conversion:
            raise ValueError(f"placeholder {{{name}}} carries a conversion or a format")
        pieces.append((text, name))
    return pieces


def fill_text(template: str, question: str) -> str:
    """Fill a system text, prefix or suffix. Raises ValueError for a placeholder other than
    `{question}`.
    """
    return _filled(template_pieces(template), {"question": question})


def slot_parts(template: str, agent: str, index: int) -> tuple[str, str]:
    """The texts before and after the output in the slot of precursor `agent`, the `index`-th in the
    prompt.

    Raises ValueError unless the template holds `{output}` once, and otherwise only `{agent}` and
    `{index}`.
    """
    pieces = template_pieces(template)
    names = [name for _, name in pieces]
    if names.count("output") != 1:
        raise ValueError(f"a slot holds {{output}} exactly once, not as in {template!r}")
    at = names.index("output")
    values = {"agent": agent, "index": str(index)}
    before = _filled([*pieces[:at], (pieces[at][0], None)], values)
    return before, _filled(pieces[at + 1 :], values)


def _filled(pieces: list[tuple[str, str | None]], values: Mapping[str, str]) -> str:
    unknown = {name for _, name in pieces if name is not None} - values.keys()
    if unknown:
        raise ValueError(f"unknown placeholder {{{min(unknown)}}}; known here: {', '.join(values)}")
    return "".join(text + (values[name] if name is not None else "") for text, name in pieces)
