"""The folder in which a router keeps files and batches: records in memory and on disk, disk work in
threads.
"""

import asyncio
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar, get_args

import orjson

from shell_router.batch.journal import locked, write_whole
from shell_router.errors import (
    ConfigError,
    ShellRouterError,
    StorageFailed,
    UnknownBatch,
    UnknownFile,
)

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


async def on_disk(step: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Do a blocking `step` in a thread; an OSError becomes StorageFailed.

    A caller that is cancelled waits until the step has ended, so that cleaning up does not race
    with it.
    """
    doing = asyncio.get_running_loop().run_in_executor(
        None, functools.partial(step, *arguments, **named)
    )
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        doing.exception()  # read, or asyncio would report it as lost
        raise
    except OSError as error:
        log.error("the folder of the batches failed: %s", error)
        raise StorageFailed(
            (
                "The router could not read or write its files: "
                f"{error.strerror or type(error).__name__}."
            ),
            remedy=(
                "Its operator should free space in batches.folder, or make it readable and "
                "writable."
            ),
        ) from error


def keep_as(draft: Path, path: Path) -> None:
    """Rename `draft`, once it is on the disk for good, to `path`."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def link_or_copy(source: Path, target: Path) -> None:
    """Have `target` hold what `source` holds, even when that is deleted."""
    try:
        target.hardlink_to(source)
    except OSError:  # not every file system has links
        shutil.copyfile(source, target)


Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDS: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of one tenant. Its content never changes. Times are Unix times; what expires is
    deleted then.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    @classmethod
    def made(
        cls, id: str, tenant: str, name: str, purpose: str, size: int, now: int, ttl_s: float | None
    ) -> Self:
        """A file that is made `now`, and expires `ttl_s` later if that is given."""
        return cls(
            id, tenant, name, purpose, size, now, None if ttl_s is None else int(now + ttl_s)
        )

    def as_json(self) -> dict[str, Any]:
        """OpenAI's file object."""
        fixed = {"object": "file", "status": "processed", "status_details": None}
        return {
            **fixed,
            **{name: value for name, value in asdict(self).items() if name != "tenant"},
        }


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a batch, or with one line of its input; lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch of one tenant. `at` says when it came to each status; all times are Unix times.

    Until it has ended its counts are only in memory: they are recovered from its results.
    """

    id: str
    tenant: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    status: Status = "validating"
    at: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    faults: tuple[Fault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    input_bytes: int = 0

    @classmethod
    def read(cls, **stored: Any) -> "BatchRecord":
        """The record that was stored as JSON."""
        faults = tuple(Fault(**fault) for fault in stored.pop("faults"))
        return cls(**stored, faults=faults)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDS

    @property
    def output_name(self) -> str:
        """The id that the file of its answers has, or will have."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def errors_name(self) -> str:
        """The id that the file of its failed lines has, or will have."""
        return f"file-{self.id.removeprefix('batch_')}-errors"

    def moved(self, status: Status, now: int) -> "BatchRecord":
        """The same batch come to `status`."""
        return replace(self, status=status, at={**self.at, status: now})

    def as_json(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        errors = {"object": "list", "data": [asdict(fault) for fault in self.faults]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors if self.faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.at.get(status) for status in get_args(Status)[1:]},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


R = TypeVar("R", FileRecord, BatchRecord)


class Records(Generic[R]):
    """Records of one kind, in memory and each in a JSON file of its own. What is noted holds until
    the next start.

    `unknown` is the error for an id that a tenant has no record of.
    """

    def __init__(
        self, folder: Path, read: Callable[..., R], unknown: Callable[[str], ShellRouterError]
    ) -> None:
        self._folder = folder
        self._unknown = unknown
        self._writing = Lock()
        found: list[R] = []
        for path in folder.glob("*.json"):
            try:
                found.append(read(**orjson.loads(path.read_bytes())))
            except (ValueError, TypeError, KeyError) as error:
                log.warning("%s is left aside, as it cannot be read: %s", path, error)
        self._by_id: dict[str, R] = {
            record.id: record for record in sorted(found, key=lambda one: (one.created_at, one.id))
        }

    def __getitem__(self, id: str) -> R:
        return self._by_id[id]

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._by_id.values()))

    def find(self, tenant: str, id: str) -> R:
        """The tenant's record. Raises UnknownFile or UnknownBatch."""
        record = self._by_id.get(id)
        if record is None or record.tenant != tenant:
            raise self._unknown(id)
        return record

    def of(self, tenant: str) -> list[R]:
        """All of that tenant's, the latest first."""
        return [record for record in reversed(self._by_id.values()) if record.tenant == tenant]

    def note(self, record: R) -> None:
        """From now on this is what is known under the record's id."""
        self._by_id[record.id] = record

    async def save(self, record: R) -> None:
        """Note the record for the next start too. Raises StorageFailed."""
        self.note(record)
        await on_disk(self._write, record.id)

    async def remove(self, id: str) -> None:
        """Forget the record. Raises StorageFailed."""
        self._by_id.pop(id, None)
        await on_disk(self._write, id)

    def _write(self, id: str) -> None:
        """Write what is known by then, so that of two writes at once the last one is up to date."""
        with self._writing:
            if record := self._by_id.get(id):
                write_whole(self._path(id), orjson.dumps(record, option=orjson.OPT_INDENT_2))
            else:
                self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"


class BatchFolder:
    """Files and batches of all tenants.

    An id becomes part of a path only when it is known, so that no client can name a path.
    """

    def __init__(self, path: Path) -> None:
        self._files = path / "files"
        self._batches = path / "batches"
        self.pools = path / "pools"
        for folder in (self._files, self._batches):
            folder.mkdir(parents=True, exist_ok=True)
            for draft in (
                *folder.glob("*.part"),
                *folder.glob("*.tmp"),
            ):  # of a router that was killed
                draft.unlink()
        self.files = Records(
            self._files,
            FileRecord,
            lambda id: UnknownFile(
                f"There is no file {id!r}.", remedy="GET /v1/files lists yours."
            ),
        )
        self.batches = Records(
            self._batches,
            BatchRecord.read,
            lambda id: UnknownBatch(
                f"There is no batch {id!r}.", remedy="GET /v1/batches lists yours."
            ),
        )
        for batch in self.batches:
            if batch.ended:
                self.clear(batch.id)

    def clear(self, batch_id: str) -> None:
        """Delete what a batch needs until its end: its input, and what its pools have written.
        Raises OSError.
        """
        self.input(batch_id).unlink(missing_ok=True)
        shutil.rmtree(self.pools / batch_id, ignore_errors=True)

    async def remove(self, file_id: str) -> None:
        """Delete the file. A batch that reads it has a link of its own. Raises StorageFailed."""
        await self.files.remove(file_id)
        await on_disk(self.content(file_id).unlink, missing_ok=True)

    async def remove_expired(self, wall: Callable[[], float]) -> None:
        """Delete the files that have expired, by Unix time. Raises StorageFailed."""
        for file in self.files:
            if file.expires_at is not None and file.expires_at <= wall():
                await self.remove(file.id)

    def content(self, file_id: str) -> Path:
        """Where the file's content is, or shall be."""
        return self._files / f"{file_id}.jsonl"

    def draft(self, file_id: str) -> Path:
        """Where the content is while it arrives."""
        return self._files / f"{file_id}.part"

    def input(self, batch_id: str) -> Path:
        """Where the batch's own link to its input is, so that the file may be deleted while the
        batch runs.
        """
        return self._batches / f"{batch_id}.input.jsonl"


@contextmanager
def opened_folder(path: Path) -> Iterator[BatchFolder]:
    """The folder, made where it is not there, for this process alone. Raises ConfigError."""
    with ExitStack() as stack:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what all tenants ask
            stack.enter_context(locked(path / "lock"))
            folder = BatchFolder(path)
        except BlockingIOError:
            raise ConfigError(
                (
                    f"batches.folder: another router uses {path}, and would run its batches a "
                    "second "
                    "time."
                ),
                remedy="Give each router a folder of its own.",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"batches.folder: {path} cannot be used: {error.strerror}.",
                remedy="Name a folder that the router may write to.",
            ) from error
        yield folder
