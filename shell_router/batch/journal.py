"""The folder of a run, from which a run that was killed continues.

run.json        the inputs on which the outputs depend; a run with others is refused
outputs.jsonl   one line per output, in order of arrival; a torn last line is cut off
results.jsonl   one line per line of the questions' file, in its order
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import orjson

from shell_router.core.exact_json import Values
from shell_router.errors import ConfigError

T = TypeVar("T")
Role = Literal["proposer", "aggregator"]
Key = tuple[str, Role, str]
"""Question, role and model of a prompt, which is answered once."""


@dataclass(frozen=True, slots=True)
class Output:
    """The text that a model wrote for a question, or the `error` that kept it from writing.

    `confidence` is the geometric mean probability of the text's tokens.
    """

    question: str
    role: Role
    model: str
    text: str = ""
    confidence: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def key(self) -> Key:
        """The key of the prompt."""
        return self.question, self.role, self.model


class Journal:
    """The outputs of a run, in `file` and in memory. `open_journal` makes it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outputs: dict[Key, Output] = {}
        self._aggregated: dict[str, Key] = {}
        for output in recover_lines(file, _parse_output):
            if output is not None:
                self._keep(output)

    def add(self, *outputs: Output) -> None:
        """Append outputs to the file. Raises ConfigError if that fails, as on a full disk."""
        try:
            append_whole(self._file, b"".join(orjson.dumps(output) + b"\n" for output in outputs))
        except OSError as error:
            raise ConfigError(
                f"{self._file}: {error.strerror}.",
                remedy="Free disk space and run the same command again: it goes on where it was.",
            ) from error
        for output in outputs:
            self._keep(output)

    def get(self, key: Key) -> Output | None:
        """Return the prompt's output, which may be its latest error; None before any."""
        return self._outputs.get(key)

    def lacks(self, key: Key) -> bool:
        """Return whether the prompt has no text yet; an error is tried again."""
        output = self._outputs.get(key)
        return output is None or bool(output.error)

    def _keep(self, output: Output) -> None:
        """Keep an output. A proposer's late text voids what the aggregator wrote without it."""
        self._outputs[output.key] = output
        if output.role == "aggregator":
            self._aggregated[output.question] = output.key
        elif not output.error:
            void = self._aggregated.pop(output.question, None)
            if void is not None:
                del self._outputs[void]


@contextmanager
def open_journal(folder: Path, inputs: Values) -> Iterator[Journal]:
    """Open the journal of a new run in `folder`, or of a run that was begun there with `inputs`.

    Raises ConfigError if the folder holds another run, is in use, or cannot be written.
    """
    file = folder / "outputs.jsonl"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _require_same(folder / "run.json", inputs)
            stack.enter_context(lock_file(file))
            journal = Journal(file)
        except BlockingIOError as error:
            raise ConfigError(
                f"{folder}: another run is at work there.",
                remedy="Wait for its end, or name another folder.",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{error.filename or folder}: {error.strerror}.", remedy="Name another folder."
            ) from error
        yield journal


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Create the file if needed and lock it for this process. The system drops a dead one's lock.

    Raises OSError: BlockingIOError if another process holds the lock.
    """
    with open(path, "ab", opener=_open_private) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _open_private(path: str, flags: int) -> int:
    """Open the file; one that is created is its owner's alone, as it holds prompts and answers."""
    return os.open(path, flags, 0o600)


def append_whole(path: Path, content: bytes) -> None:
    """Append all of `content` to the file, or nothing of it. Raises OSError."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "ab", opener=_open_private) as file:
            file.write(content)
    except OSError:
        with contextlib.suppress(OSError):  # the first error says what is wrong
            os.truncate(path, size)
        raise


def recover_lines(path: Path, read: Callable[[bytes], T]) -> list[T]:
    """Read each line that `append_whole` has written; without a file there are none.

    The file is cut off before a torn last line, or before the first line that cannot be read.
    """
    values: list[T] = []
    whole_bytes = 0
    if path.exists():
        with (
            path.open("rb") as file,
            contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError),
        ):
            for line in file:
                if not line.endswith(b"\n"):
                    break
                values.append(read(line))
                whole_bytes += len(line)
        os.truncate(path, whole_bytes)
    return values


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as a whole and sync it to the disk, or leave it as it was. Raises OSError."""
    draft = path.with_suffix(".tmp")
    try:
        with open(draft, "wb", opener=_open_private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _require_same(file: Path, inputs: Values) -> None:
    """Write the inputs of a new run, or raise ConfigError if the folder's run has others."""
    new = orjson.loads(orjson.dumps(inputs))
    if not file.exists():
        replace_file(file, orjson.dumps(new, option=orjson.OPT_INDENT_2) + b"\n")
        return
    try:
        old = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError:
        old = None
    if not isinstance(old, dict):
        raise ConfigError(f"{file} is not what a run writes.", remedy="Name another folder.")
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed:
        raise ConfigError(
            f"{file.parent} holds a run with other {', '.join(changed)}.",
            remedy="Name another folder, or undo the change. If a router resumed a batch: send "
            "the batch again.",
        )


def _parse_output(line: bytes) -> Output | None:
    """Parse a line; None for a broken one, whose prompt is asked again."""
    try:
        return Output(**orjson.loads(line))
    except (orjson.JSONDecodeError, TypeError):
        return None
