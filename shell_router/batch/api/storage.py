"""The folder of files and batches: records in memory and on disk, disk work in threads."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Generic, Literal, ParamSpec, Self, TypeVar, get_args

import orjson
from pydantic import TypeAdapter, ValidationError

from shell_router.batch.journal import lock_file, replace_file
from shell_router.core.exact_json import NewValues
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


async def on_disk(step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking `step` in a thread; an OSError becomes StorageFailed.

    A cancelled caller still waits for the end of the step, so that its cleanup does not race.
    """
    step_task = asyncio.ensure_future(asyncio.to_thread(step, *args, **kwargs))
    try:
        return await asyncio.shield(step_task)
    except asyncio.CancelledError:
        await asyncio.wait([step_task])
        step_task.exception()  # asyncio logs exceptions that are never read
        raise
    except OSError as error:
        log.error("the folder of the batches failed: %s", error)
        raise StorageFailed(
            "The router could not read or write its files: "
            f"{error.strerror or type(error).__name__}.",
            remedy="Its operator should free space in batches.folder, or make it readable and "
            "writable.",
        ) from error


def keep_as(draft: Path, path: Path) -> None:
    """Sync `draft` to the disk and rename it to `path`."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the content of `source`; it stays when `source` is deleted."""
    try:
        target.hardlink_to(source)
    except OSError:  # not every file system has links
        target.touch(mode=0o600)
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
    """A file of one tenant, whose content never changes. Times are Unix times in seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    @classmethod
    def create(
        cls, id: str, tenant: str, name: str, purpose: str, size: int, now: int, ttl_s: float | None
    ) -> Self:
        """Create the record of a file made `now` that expires after `ttl_s`; None keeps it."""
        expires_at = None if ttl_s is None else int(now + ttl_s)
        return cls(id, tenant, name, purpose, size, now, expires_at)

    def as_json(self) -> NewValues:
        """Return OpenAI's file object."""
        body = {"object": "file", "status": "processed", "status_details": None, **asdict(self)}
        del body["tenant"]
        return body


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of a batch, or of one line of its input; lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch of one tenant. Times are Unix times in seconds.

    `at` is when the batch entered each status. The counts of a running batch are in memory only:
    after a restart they are recovered from its results.
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

    @property
    def ended(self) -> bool:
        """Whether the batch has reached a final status."""
        return self.status in ENDS

    @property
    def output_id(self) -> str:
        """The id of the file of answers, which exists from the batch's end on."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def errors_id(self) -> str:
        """The id of the file of failed lines, which exists from the batch's end on."""
        return f"file-{self.id.removeprefix('batch_')}-errors"

    def enter_status(self, status: Status, now: int) -> "BatchRecord":
        """Return the record of the same batch in `status` since `now`."""
        return replace(self, status=status, at={**self.at, status: now})

    def as_json(self) -> NewValues:
        """Return OpenAI's batch object."""
        errors = {"object": "list", "data": [asdict(fault) for fault in self.faults]}
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
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
            "request_counts": counts,
            "metadata": self.metadata,
        }


R = TypeVar("R", FileRecord, BatchRecord)


class Records(Generic[R]):
    """Records of one kind, in memory and each in a JSON file of its own.

    `note` changes a record until the next start, `save` for good. `unknown` builds the error for an
    id that a tenant has no record of.
    """

    def __init__(
        self, folder: Path, kind: type[R], unknown: Callable[[str], ShellRouterError]
    ) -> None:
        self._folder = folder
        self._unknown = unknown
        self._writing = Lock()
        reader = TypeAdapter(kind)
        records: list[R] = []
        for path in folder.glob("*.json"):
            try:
                records.append(reader.validate_json(path.read_bytes(), extra="forbid"))
            except ValidationError as error:
                log.warning("%s cannot be read and is skipped: %s", path, error)
        records.sort(key=lambda record: (record.created_at, record.id))
        self._by_id: dict[str, R] = {record.id: record for record in records}

    def __getitem__(self, id: str) -> R:
        return self._by_id[id]

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._by_id.values()))

    def find(self, tenant: str, id: str) -> R:
        """Return the tenant's record. Raises UnknownFile or UnknownBatch."""
        record = self._by_id.get(id)
        if record is None or record.tenant != tenant:
            raise self._unknown(id)
        return record

    def of(self, tenant: str) -> list[R]:
        """Return the tenant's records, the latest first."""
        return [record for record in reversed(self._by_id.values()) if record.tenant == tenant]

    def note(self, record: R) -> None:
        """Keep the record in memory, until the next start."""
        self._by_id[record.id] = record

    async def save(self, record: R) -> None:
        """Keep the record in memory and on disk. Raises StorageFailed."""
        self.note(record)
        await on_disk(self._write, record.id)

    async def remove(self, id: str) -> None:
        """Delete the record. Raises StorageFailed."""
        self._by_id.pop(id, None)
        await on_disk(self._write, id)

    def _write(self, id: str) -> None:
        """Write the record as it is when the write begins, so the last write is up to date."""
        with self._writing:
            if record := self._by_id.get(id):
                replace_file(self._path(id), orjson.dumps(record, option=orjson.OPT_INDENT_2))
            else:
                self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"


class BatchFolder:
    """The files and batches of all tenants.

    Only the id of a record becomes part of a path, so that no client can name a path.
    """

    def __init__(self, path: Path) -> None:
        self._files = path / "files"
        self._batches = path / "batches"
        self.pools = path / "pools"
        for folder in (self._files, self._batches):
            folder.mkdir(parents=True, exist_ok=True)
            # a router that was killed leaves drafts
            for draft in (*folder.glob("*.part"), *folder.glob("*.tmp")):
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
            BatchRecord,
            lambda id: UnknownBatch(
                f"There is no batch {id!r}.", remedy="GET /v1/batches lists yours."
            ),
        )
        for batch in self.batches:
            if batch.ended:
                self.clear(batch.id)

    def clear(self, batch_id: str) -> None:
        """Delete a batch's input and the runs of its pools. Raises OSError."""
        self.input(batch_id).unlink(missing_ok=True)
        shutil.rmtree(self.pools / batch_id, ignore_errors=True)

    async def remove(self, file_id: str) -> None:
        """Delete the file; a batch that reads it has its own link. Raises StorageFailed."""
        await self.files.remove(file_id)
        await on_disk(self.content(file_id).unlink, missing_ok=True)

    async def remove_expired(self, wall: Callable[[], float]) -> None:
        """Delete the files that have expired. Raises StorageFailed."""
        for file in self.files:
            if file.expires_at is not None and file.expires_at <= wall():
                await self.remove(file.id)

    def content(self, file_id: str) -> Path:
        """Return the path of the file's content."""
        return self._files / f"{file_id}.jsonl"

    def draft(self, file_id: str) -> Path:
        """Return the path of the content while it is uploaded."""
        return self._files / f"{file_id}.part"

    def input(self, batch_id: str) -> Path:
        """Return the path of the batch's own link to its input; the file itself may be deleted."""
        return self._batches / f"{batch_id}.input.jsonl"


@contextmanager
def open_folder(path: Path) -> Iterator[BatchFolder]:
    """Create the folder if needed and lock it for this process. Raises ConfigError."""
    with ExitStack() as stack:
        try:
            # private: it holds the prompts of all tenants
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(lock_file(path / "lock"))
            folder = BatchFolder(path)
        except BlockingIOError:
            raise ConfigError(
                f"batches.folder: another router uses {path}, so its batches would run twice.",
                remedy="Give each router a folder of its own.",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"batches.folder: {path} cannot be used: {error.strerror}.",
                remedy="Name a folder that the router may write to.",
            ) from error
        yield folder
