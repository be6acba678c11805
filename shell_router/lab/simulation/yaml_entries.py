"""YAML files that commands write into, entry by entry: what else stands in them, comments included, stays as it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shell_router.errors import ConfigError

ANY_WIDTH = 1_000_000


def write_entries(file: Path, section: str, entries: Mapping[str, str], head: str = "") -> None:
    """Write `file`, which begins as `head` where it is not there yet, with these entries. Raises ConfigError."""
    before = file.read_text(encoding="utf-8") if file.exists() else head
    try:
        file.write_text(with_entries(before, section, entries, file), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.", remedy="Name a file that you may write.") from error


def with_entries(text: str, section: str, entries: Mapping[str, str], file: Path) -> str:
    """The `text` of `file` with each entry in the place of the lines it has in `section`, or after all others there.

    Entries are lines, indented by two. A section that is not there is added at the end. Raises ConfigError where its
    entries do not stand on lines of their own, indented by two.
    """
    text = _with_section(text, section)
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    places, end = _places(text, section, file)
    added = "".join(entry for name, entry in entries.items() if name not in places)
    replaced = [(*place, entries[name]) for name, place in places.items() if name in entries]
    untouched = max((end, *(after for _, after, _ in replaced))) < len(lines)
    for begin, after, entry in sorted([*replaced, (end, end, added)], reverse=True):
        lines[begin:after] = [entry]
    whole = "".join(lines)
    return whole.removesuffix("\n") if untouched and not text.endswith("\n") else whole


def entry_text(name: str, value: object, comments: Sequence[str] = ()) -> str:
    """The lines of one entry, indented by two, with a line under its name for each of `comments`."""
    first, *lines = yaml.safe_dump({name: value}, sort_keys=False).splitlines()
    return "".join(f"  {line}\n" for line in (first, *(f"  # {one}" for one in comments), *lines))


def entry_line(name: str, value: object) -> str:
    """An entry on one line."""
    dumped = yaml.safe_dump({name: value}, sort_keys=False, default_flow_style=True, width=ANY_WIDTH)
    return f"  {dumped.strip()[1:-1]}\n"


def rounded(values: Mapping[str, Any], digits: int) -> dict[str, Any]:
    """The values to significant digits: a step takes milliseconds, a token's share of it may take picoseconds."""
    return {name: float(f"{one:.{digits}g}") if isinstance(one, float) else one for name, one in values.items()}


def _with_section(text: str, section: str) -> str:
    top = _top(text)
    if not top or section in top:
        return text
    return text + ("" if text.endswith("\n") else "\n") + f"{section}:\n"


def _top(text: str) -> Mapping[str, yaml.Node]:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return {key.value: value for key, value in root.value} if isinstance(root, yaml.MappingNode) else {}


def _places(text: str, section: str, file: Path) -> tuple[Mapping[str, tuple[int, int]], int]:
    """Per entry its lines, from the first to the one after the last; and where another is to be added."""
    found, lines = _top(text).get(section), text.splitlines()
    if isinstance(found, yaml.ScalarNode) and not found.value:
        return {}, found.end_mark.line + 1
    if not isinstance(found, yaml.MappingNode) or found.flow_style or found.start_mark.column != 2:
        raise ConfigError(
            f"{file}: entries can only be added to {section} that stand on lines of their own, indented by two spaces.",
            remedy="Write them so, or name another file.",
        )
    begins = [key.start_mark.line for key, _ in found.value]
    nexts = [*begins[1:], found.end_mark.line + (not text.endswith("\n"))]
    ends = [_last(lines, begin, before) for begin, before in zip(begins, nexts, strict=True)]
    names = [key.value for key, _ in found.value]
    return dict(zip(names, zip(begins, ends, strict=True), strict=True)), ends[-1]


def _last(lines: Sequence[str], begin: int, before: int) -> int:
    """The line after the last of those, up to `before`, that stand deeper than the key at line `begin`.

    Blank lines and comments after that are of what follows.
    """
    deeper = [
        at for at in range(begin + 1, min(before, len(lines))) if lines[at].startswith("   ") and lines[at].strip()
    ]
    return max(deeper, default=begin) + 1
