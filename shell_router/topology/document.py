"""YAML text as plain values, with the line of each; and what is wrong with a file, with its
line."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path as File
from typing import Any

import orjson
import yaml

from shell_router.errors import ConfigError, DataError, InvalidField, TopologyError

Path = tuple[str | int, ...]
"""Keys and positions that lead from a document's top to a value."""

Values = Mapping[str, Any]
"""A mapping of a file, as plain values."""

MAX_CHARACTERS = 1_000_000
MAX_VALUES = 50_000
MAX_DEPTH = 50
MAX_NUMBER_CHARACTERS = 500
"""YAML's sexagesimal numbers take a time that grows with the square of their length."""
MAX_REPORTED = 20
"""Problems of a client's document that its answer names."""

_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "null")}
_TEXT_TAG = "tag:yaml.org,2002:str"
_BAD_SCALAR = (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError)


def spelled(at: Path) -> str:
    """A path as people write it: `agents.solver.precursors[0]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).lstrip(".")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file. `at` leads to the value, or is a line number."""

    at: Path | int
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says, as JSON-like values, and where it says so. A key's line is its value's
    line.

    One without `lines` is a client's: its problems are InvalidField, and `source` is the field that
    holds it, or empty.
    """

    source: str
    value: Any
    lines: Mapping[Path, int] | None
    error: type[ConfigError] = TopologyError

    def line_of(self, at: Path) -> int:
        """Line of the value at `at`, or of what holds it where the file does not say it."""
        lines = self.lines or {}
        while at and at not in lines:
            at = at[:-1]
        return lines.get(at, 1)

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise `error` naming every problem, one to a line, in the file's order, if there is
        any."""
        if self.lines is None:
            self._refuse_fields(problems)
            return
        located = [
            (p.at if isinstance(p.at, int) else self.line_of(p.at), p.message, p.remedy)
            for p in problems
        ]
        if not located:
            return
        lines = [
            (f"{self.source}:{line}: {message}", remedy)
            for line, message, remedy in sorted(set(located))
        ]
        if len(lines) == 1:
            raise self.error(lines[0][0], remedy=lines[0][1])
        raise self.error("\n".join(f"{message} {remedy}" for message, remedy in lines))

    def _refuse_fields(self, problems: Iterable[Problem]) -> None:
        found = list(islice(problems, MAX_REPORTED))
        if not found:
            return
        fields = [spelled((self.source, *(p.at if isinstance(p.at, tuple) else ()))) for p in found]
        said = [
            f"{field}: {p.message}" if field else p.message
            for field, p in zip(fields, found, strict=True)
        ]
        if len(found) == 1:
            raise InvalidField(said[0], field=fields[0], remedy=found[0].remedy)
        lines = [f"{message} {p.remedy}" for message, p in zip(said, found, strict=True)]
        raise InvalidField("\n".join(lines), field=fields[0])


def clients_document(value: Values, source: str) -> Document:
    """What a client sent as JSON, in its field `source`. Raises InvalidField where it is nested too
    deeply.
    """
    document = Document(source, value, None)
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        if not layer:
            return document
        layer = [
            item
            for one in layer
            for item in (
                one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
            )
        ]
    document.refuse(
        [Problem((), "Values are nested too deeply.", f"Nest at most {MAX_DEPTH} levels.")]
    )
    return document


def read_text(path: File, error: type[ConfigError] = TopologyError) -> str:
    """The text of a file. Raises `error`, which begins with the file and the line."""
    try:
        content = path.read_bytes()
    except OSError as failed:
        raise error(
            f"{path}:1: The file cannot be read: {failed.strerror}.",
            remedy="Check its name and its permissions.",
        ) from failed
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as failed:
        line = content.count(b"\n", 0, failed.start) + 1
        raise error(
            f"{path}:{line}: This is not UTF-8 text.", remedy="Save the file as UTF-8."
        ) from failed


def read_json_lines(path: File, form: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each line that is not blank its `file:line` and its JSON object. Raises DataError, with
    `form` as remedy.
    """
    for number, line in enumerate(read_text(path, DataError).split("\n"), 1):
        if line.strip():
            try:
                found = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number}: this is not JSON ({error}).", remedy=form
                ) from None
            if not isinstance(found, dict):
                raise DataError(f"{path}:{number}: this is not a JSON object.", remedy=form)
            yield f"{path}:{number}", found


def read_document(text: str, *, source: str, error: type[ConfigError] = TopologyError) -> Document:
    """Read the one YAML document in `text`. Raises `error` naming `source` and the line."""
    lines: dict[Path, int] = {}
    document = Document(source, None, lines, error)
    if len(text) > MAX_CHARACTERS:
        document.refuse(
            [Problem(1, f"The file holds over {MAX_CHARACTERS} characters.", "Make it smaller.")]
        )
    problems: list[Problem] = []
    try:
        reader = _Reader(text, lines, problems)
        root = reader.get_single_node()
        if root is None:
            value = None
        else:
            value = reader.value(root, ())
    except RecursionError as found:
        if isinstance(found.args[0], int):
            line = found.args[0]
        else:
            line = 1
        limits = (
            f"at most {MAX_VALUES} keys and values, aliases spelled out, nested at most "
            f"{MAX_DEPTH} levels"
        )
        document.refuse(
            [Problem(line, "Values are too many or nested too deeply.", f"Write {limits}.")]
        )
    except yaml.YAMLError as found:
        document.refuse([_syntax_problem(found, text)])
    document.refuse(problems)
    if value is None:
        see = "Describe a topology; docs/how-to/write-a-topology.md shows the shortest one."
        raise error(f"{source}:1: The file is empty.", remedy=see if error is TopologyError else "")
    return replace(document, value=value)


def _syntax_problem(error: yaml.YAMLError, text: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        remedy = "Correct the YAML; text with ': ', '#', braces or a leading symbol needs quotes."
        return Problem(
            mark.line + 1 if mark else 1,
            f"Not valid YAML: {error.problem or error.context}.",
            remedy,
        )
    return Problem(
        text.count("\n", 0, getattr(error, "position", 0)) + 1,
        "Not valid YAML: a character that may not stand in YAML.",
        "Remove it, or write it as an escape in double quotes.",
    )


class _Reader(yaml.SafeLoader):
    """Gives plain values, the line of each, and what cannot be one.

    Raises RecursionError with the line where there are too many values or levels: PyYAML's time
    grows with both. An alias is read again wherever it stands, hence the second count.
    """

    def __init__(self, text: str, lines: dict[Path, int], problems: list[Problem]) -> None:
        super().__init__(text)
        self._lines = lines
        self._problems = problems
        self._composed = self._read = 0

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level > MAX_DEPTH:
            raise RecursionError(self.line + 1)
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: int | None) -> yaml.Node | None:
        self._composed += 1
        if self._composed > MAX_VALUES:
            raise RecursionError(self.line + 1)
        return super().compose_node(parent, index)  # type: ignore[arg-type]

    def value(self, node: yaml.Node, at: Path, line: int | None = None) -> Any:
        """What the node says; None, and a problem, where that is no plain value."""
        if line is None:
            line = node.start_mark.line + 1
        self._lines.setdefault(at, line)
        self._read += 1
        if self._read > MAX_VALUES or len(at) > MAX_DEPTH:
            raise RecursionError(line)
        if isinstance(node, yaml.MappingNode):
            return {
                key: self.value(value, (*at, key), line) for key, value, line in self._entries(node)
            }
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*at, position)) for position, item in enumerate(node.value)]
        return self._scalar(node, line)

    def _entries(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, int]]:
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TEXT_TAG:
                if isinstance(key, str):
                    shown = key
                else:
                    shown = "a list or mapping"
                wrong = f"The key {shown} is not text."
                remedy = "Put it in quotes if it is meant as a name."
                self._problems.append(Problem(line, wrong, remedy))
            elif key in first_lines:
                wrong = f"The key '{key}' stands twice; first in line {first_lines[key]}."
                self._problems.append(Problem(line, wrong, "Keep one of them."))
            else:
                first_lines[key] = line
                yield key, value_node, line

    def _scalar(self, node: yaml.Node, line: int) -> Any:
        if node.tag == _TEXT_TAG:
            return node.value
        if node.tag in _PLAIN_TAGS and len(node.value) <= MAX_NUMBER_CHARACTERS:
            with suppress(*_BAD_SCALAR):
                return self.construct_object(node)
        kind = node.tag.rpartition(":")[2]
        # unquoted, for it may be a secret
        message = f"This is read as a YAML {kind}, which cannot stand here."
        self._problems.append(Problem(line, message, "Put it in quotes if it is meant as text."))
        return None
