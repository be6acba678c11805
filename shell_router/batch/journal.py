"""The folder of a run: what was asked, what every model wrote, as it came, and the results at the
end.

    run.json        what the run depends on; another run is refused here
    outputs.jsonl   one line per output, in the order in which they came
    results.jsonl   one line per line of the questions' file, in its order

A run that was killed goes on from `outputs.jsonl`: its last line may be torn and is then cut off.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from shell_router.errors import ConfigError

T = TypeVar("T")
Role = Literal["proposer", "aggregator"]
Key = tuple[str, Role, str]
"""Question, role and model: each is answered once."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one model wrote for one question, or the `error` that kept it from writing.

    `confidence` is the geometric mean probability of its tokens.
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
        """What it is an output of."""
        return self.question, self.role, self.model


class Journal:
    """The outputs of a run, in `file` and at hand. Made by `opened`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outputs: dict[Key, Output] = {}
        self._aggregated: dict[str, Key] = {}
        for output in filter(None, recovered(file, _output)):
            self._keep(output)

    def add(self, *outputs: Output) -> None:
        """Write these down. Raises ConfigError where they cannot be, as on a full disk."""
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
        """The output, or the error that was met last."""
        return self._outputs.get(key)

    def lacks(self, key: Key) -> bool:
        """Whether nothing was written for it yet; an error is tried again."""
        output = self._outputs.get(key)
        return output is None or bool(output.error)

    def _keep(self, output: Output) -> None:
        """A proposer that answers late, after an error, voids what the aggregator wrote without
        it."""
        self._outputs[output.key] = output
        if output.role == "aggregator":
            self._aggregated[output.question] = output.key
        elif not output.error and (void := self._aggregated.pop(output.question, None)):
            del self._outputs[void]


@contextmanager
def opened(folder: Path, depends_on: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal of a new run in `folder`, or of the one that was begun there with the same
    `depends_on`.

    Raises ConfigError where the folder holds another run, one that is still at work, or cannot be
    written.
    """
    file = folder / "outputs.jsonl"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _require_same(folder / "run.json", depends_on)
            stack.enter_context(locked(file))
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
def locked(file: Path) -> Iterator[None]:
    """The file, made where it is not there, for this process alone. Raises OSError: BlockingIOError
    if it is taken.
    """
    with file.open("ab") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by whatever ends this process
        yield


def append_whole(file: Path, content: bytes) -> None:
    """Add all of `content` at the end of the file, or nothing of it. Raises OSError."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("ab") as opened:
            opened.write(content)
    except OSError:
        with contextlib.suppress(OSError):  # the first one says what is wrong
            os.truncate(file, size)
        raise


def recovered(file: Path, read: Callable[[bytes], T]) -> list[T]:
    """What `read` makes of each line that `append_whole` has written, if there are any.

    A last line that was torn when a process was killed, or what begins with a line that cannot be
    read, is cut off.
    """
    found: list[T] = []
    whole_bytes = 0
    if file.exists():
        with (
            file.open("rb") as opened,
            contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError),
        ):
            for line in opened:
                if not line.endswith(b"\n"):
                    break
                found.append(read(line))
                whole_bytes += len(line)
        os.truncate(file, whole_bytes)
    return found


def write_whole(file: Path, content: bytes) -> None:
    """Write a file as a whole, so that it is on the disk for good, or leave it as it was. Raises
    OSError.
    """
    draft = file.with_suffix(".tmp")
    try:
        with draft.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _require_same(file: Path, depends_on: Mapping[str, Any]) -> None:
    wanted = orjson.loads(orjson.dumps(depends_on))
    if not file.exists():
        write_whole(file, orjson.dumps(wanted, option=orjson.OPT_INDENT_2) + b"\n")
        return
    try:
        begun = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError:
        begun = None
    if not isinstance(begun, dict):
        raise ConfigError(f"{file} is not what a run writes.", remedy="Name another folder.")
    if changed := [name for name in {**begun, **wanted} if begun.get(name) != wanted.get(name)]:
        raise ConfigError(
            f"{file.parent} holds a run with other {', '.join(changed)}.",
            remedy=(
                "Name another folder, or undo the change. If a router resumed a batch: send "
                "the batch again."
            ),
        )


def _output(line: bytes) -> Output | None:
    try:
        return Output(**orjson.loads(line))
    except (orjson.JSONDecodeError, TypeError):
        return None  # its output is asked for again
