"""YAML text as plain values with the line of each, and documents that clients sent as JSON."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from pathlib import Path as File
from typing import Any

import orjson
import yaml

from shell_router.core.sampling import check_depth
from shell_router.errors import ConfigError, DataError, InvalidField, TopologyError

Path = tuple[str | int, ...]
"""Keys and positions that lead from a document's top to a value."""

Values = Mapping[str, Any]
"""A mapping of a file, as plain values."""

MAX_CHARACTERS = 1_000_000
MAX_VALUES = 50_000
MAX_DEPTH = 50
MAX_NUMBER_CHARACTERS = 500
"""The most characters of a number: parsing YAML's sexagesimal numbers takes quadratic time."""
MAX_INTEGER = 2**63
"""Whole numbers are smaller, because JSON readers and engines take no larger ones."""
MAX_REPORTED = 20
"""The most problems of a client's document that the answer reports."""

SEE_TOPOLOGY = "Describe a topology; docs/how-to/write-a-topology.md shows the shortest one."

_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "null")}
_TEXT_TAG = "tag:yaml.org,2002:str"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BAD_SCALAR = (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError)


def spell(path: Path) -> str:
    """Write a path as people do: `agents.solver.precursors[0]`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).lstrip(".")


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of a document. `at` leads to the value, or is a line number."""

    at: Path | int
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """The plain values of a document, and the line of each. A key's line is its value's line.

    A document without `lines` is a client's: its problems are InvalidField, and `source` is the
    field that holds it, or empty.
    """

    source: str
    value: Any
    lines: Mapping[Path, int] | None
    error: type[ConfigError] = TopologyError

    def line_of(self, path: Path) -> int:
        """Return the line of the value at `path`, or of the nearest value that holds it."""
        lines = self.lines or {}
        while path and path not in lines:
            path = path[:-1]
        return lines.get(path, 1)

    def require_none(self, problems: Iterable[Problem]) -> None:
        """Raise `error` with all problems, one a line and in the file's order, if there are any."""
        if self.lines is None:
            self._require_no_fields(problems)
            return
        located = {
            (p.at if isinstance(p.at, int) else self.line_of(p.at), p.message, p.remedy)
            for p in problems
        }
        errors = [
            self.error(f"{self.source}:{line}: {message}", remedy=remedy)
            for line, message, remedy in sorted(located)
        ]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise self.error("\n".join(map(str, errors)))

    def _require_no_fields(self, problems: Iterable[Problem]) -> None:
        errors: list[InvalidField] = []
        for problem in islice(problems, MAX_REPORTED):
            at = problem.at if isinstance(problem.at, tuple) else ()
            field = spell((self.source, *at))
            message = f"{field}: {problem.message}" if field else problem.message
            errors.append(InvalidField(message, field=field, remedy=problem.remedy))
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise InvalidField("\n".join(map(str, errors)), field=errors[0].field)


def client_document(value: Values, source: str) -> Document:
    """Wrap the JSON value that a client sent in its field `source`.

    Raises:
        InvalidField: The value is nested too deeply, or holds too many values.
    """
    check_depth(value, source)
    return Document(source, value, None)


def read_text(path: File, error: type[ConfigError] = TopologyError) -> str:
    """Read a text file. Raises `error`, which begins with the file and the line."""
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise error(
            f"{path}:1: The file cannot be read: {failure.strerror}.",
            remedy="Check its name and its permissions.",
        ) from failure
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as failure:
        line = content.count(b"\n", 0, failure.start) + 1
        raise error(
            f"{path}:{line}: This is not UTF-8 text.", remedy="Save the file as UTF-8."
        ) from failure


def read_json_lines(path: File, form: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `file:line` and the JSON object of each line that is not blank.

    Raises:
        DataError: A line holds no JSON object; `form` is the remedy.
    """
    for number, line in enumerate(read_text(path, DataError).split("\n"), 1):
        if line.strip():
            try:
                item = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number}: this is not JSON ({error}).", remedy=form
                ) from None
            if not isinstance(item, dict):
                raise DataError(f"{path}:{number}: this is not a JSON object.", remedy=form)
            yield f"{path}:{number}", item


def read_document(
    text: str,
    *,
    source: str,
    error: type[ConfigError] = TopologyError,
    see: str = SEE_TOPOLOGY,
    environ: Mapping[str, str] | None = None,
) -> Document:
    """Read the one YAML document in `text`; if there is an `environ`, `${NAME}` is its variable.

    Raises `error`, which begins with `source:line:`; `see` is its remedy for an empty text.
    """
    lines: dict[Path, int] = {}
    document = Document(source, None, lines, error)
    if len(text) > MAX_CHARACTERS:
        wrong = f"The file holds over {MAX_CHARACTERS} characters."
        document.require_none([Problem(1, wrong, "Make it smaller.")])
    problems: list[Problem] = []
    try:
        reader = _Reader(text, lines, problems, environ)
        root = reader.get_single_node()
        value = None if root is None else reader.read(root, ())
    except RecursionError as limit:
        line = limit.args[0] if isinstance(limit.args[0], int) else 1
        remedy = (
            f"Write at most {MAX_VALUES} keys and values, aliases spelled out, nested at most "
            f"{MAX_DEPTH} levels."
        )
        problem = Problem(line, "Values are too many or nested too deeply.", remedy)
        document.require_none([problem])
    except yaml.YAMLError as failure:
        document.require_none([_syntax_problem(failure, text)])
    document.require_none(problems)
    if value is None:
        raise error(f"{source}:1: The file is empty.", remedy=see)
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
        "Not valid YAML: YAML allows no such character.",
        "Remove it, or write it as an escape in double quotes.",
    )


class _Reader(yaml.SafeLoader):
    """Reads YAML nodes as values that JSON has too, and notes the line and the faults of each.

    Raises RecursionError with the line if there are too many values or levels, because PyYAML's
    time grows with both. Values are counted when PyYAML composes them, and again when they are
    read, because every use of an alias is read anew.
    """

    def __init__(
        self,
        text: str,
        lines: dict[Path, int],
        problems: list[Problem],
        environ: Mapping[str, str] | None,
    ) -> None:
        super().__init__(text)
        self._environ = environ
        self._lines = lines
        self._problems = problems
        self._composed = 0
        self._read = 0

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Bound the depth before PyYAML scans further."""
        if self.flow_level > MAX_DEPTH:
            raise RecursionError(self.line + 1)
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: int | None) -> yaml.Node | None:
        """Bound the number of values before PyYAML composes further."""
        self._composed += 1
        if self._composed > MAX_VALUES:
            raise RecursionError(self.line + 1)
        return super().compose_node(parent, index)  # type: ignore[arg-type]

    def read(self, node: yaml.Node, path: Path, line: int | None = None) -> Any:
        """Return the node's value; if JSON has no such value, note a problem and return None."""
        if line is None:
            line = node.start_mark.line + 1
        self._lines.setdefault(path, line)
        self._read += 1
        if self._read > MAX_VALUES or len(path) > MAX_DEPTH:
            raise RecursionError(line)
        tagged = node.tag not in _COLLECTION_TAGS
        if isinstance(node, yaml.MappingNode) and not tagged:
            entries = self._entries(node)
            return {key: self.read(item, (*path, key), line) for key, item, line in entries}
        if isinstance(node, yaml.SequenceNode) and not tagged:
            return [self.read(item, (*path, place)) for place, item in enumerate(node.value)]
        return self._read_scalar(node, path, line)

    def _entries(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, int]]:
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE_TAG:
                remedy = "Write the keys out; aliases (*name) are read."
                self._problems.append(Problem(line, "Merge keys (<<) are not read.", remedy))
            elif not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TEXT_TAG:
                name = key if isinstance(key, str) else "a list or mapping"
                wrong = f"The key {name} is not text."
                remedy = "Put it in quotes if it is meant as a name."
                self._problems.append(Problem(line, wrong, remedy))
            elif key in first_lines:
                wrong = f"The key '{key}' is used twice; first in line {first_lines[key]}."
                self._problems.append(Problem(line, wrong, "Keep one of them."))
            else:
                first_lines[key] = line
                self._require_unicode(key, line)
                yield key, value_node, line

    def _fill(self, node: yaml.ScalarNode, line: int) -> yaml.ScalarNode:
        """Return the scalar with its variables, which may make a plain one a number."""
        environ = self._environ
        names = _VARIABLE.findall(node.value)
        if environ is None or not names:
            return node
        for name in names:
            if name not in environ:
                wrong = f"The environment variable {name} is not set."
                self._problems.append(Problem(line, wrong, "Set it."))
        value = _VARIABLE.sub(lambda found: environ.get(found[1], ""), node.value)
        implicit = not node.style, bool(node.style)
        tag = self.resolve(yaml.ScalarNode, value, implicit)  # type: ignore[no-untyped-call]
        return yaml.ScalarNode(str(tag), value)

    def _read_scalar(self, node: yaml.Node, path: Path, line: int) -> Any:
        if isinstance(node, yaml.ScalarNode):
            node = self._fill(node, line)
        if node.tag == _TEXT_TAG and isinstance(node.value, str):
            self._require_unicode(node.value, line)
            return node.value
        if node.tag in _PLAIN_TAGS and len(node.value) <= MAX_NUMBER_CHARACTERS:
            with suppress(*_BAD_SCALAR):
                value = self.construct_object(node)
                self._require_json_number(value, path, line)
                return value
        kind = node.tag.rpartition(":")[2]
        # The value is not quoted, for it may be a secret.
        message = f"This is read as a YAML {kind}, which is not allowed here."
        self._problems.append(Problem(line, message, "Put it in quotes if it is meant as text."))
        return None

    def _require_unicode(self, text: str, line: int) -> None:
        if _SURROGATE.search(text):
            wrong = "This text is not valid Unicode: it has half of a surrogate pair."
            self._problems.append(Problem(line, wrong, "Write the whole character."))

    def _require_json_number(self, value: object, path: Path, line: int) -> None:
        if isinstance(value, float) and not isfinite(value):
            wrong = f"{spell(path)} must be a finite number."
            self._problems.append(Problem(line, wrong, "Write a finite number."))
        if isinstance(value, int) and abs(value) >= MAX_INTEGER:
            wrong = f"{spell(path)} must be a whole number below 2**63."
            self._problems.append(Problem(line, wrong, "Write a smaller number."))
