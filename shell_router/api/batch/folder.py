"""The folder in which a router keeps files and batches."""

import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar

import orjson

from shell_router.api.batch.disk import on_disk, write_whole
from shell_router.api.batch.records import BatchRecord, FileRecord
from shell_router.errors import ConfigError, UnknownBatch, UnknownFile

log = logging.getLogger(__name__)


class Record(Protocol):
    """What both kinds of records have."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def created_at(self) -> int: ...


R = TypeVar("R", bound=Record)


class Records(Generic[R]):
    """Records of one kind: all of them in memory, each in a small JSON file of its own.

    What is noted holds at once, and for the next start when it has been saved.
    """

    def __init__(self, folder: Path, read: Callable[..., R]) -> None:
        self._folder = folder
        self._writing = Lock()
        found = [record for path in folder.glob("*.json") if (record := _stored(path, read))]
        self._by_id = {record.id: record for record in sorted(found, key=lambda one: (one.created_at, one.id))}

    def __getitem__(self, id: str) -> R:
        return self._by_id[id]

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._by_id.values()))

    def find(self, tenant: str, id: str) -> R | None:
        """The record, if it is that tenant's."""
        record = self._by_id.get(id)
        return record if record is not None and record.tenant == tenant else None

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
        await on_disk(self._path(id).unlink, missing_ok=True)

    def _write(self, id: str) -> None:
        """What is known by then is written: of two writes at once the last one is not behind."""
        with self._writing:
            if record := self._by_id.get(id):
                write_whole(self._path(id), orjson.dumps(record, option=orjson.OPT_INDENT_2))

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"


class BatchFolder:
    """Files and batches of all tenants.

    An id becomes part of a path only when it is known, so that no client can name a path.
    """

    def __init__(self, path: Path) -> None:
        self._files = path / "files"
        self._batches = path / "batches"
        for folder in (self._files, self._batches):
            folder.mkdir(parents=True, exist_ok=True)
            for draft in (*folder.glob("*.part"), *folder.glob("*.tmp")):  # of a router that was killed
                draft.unlink()
        self.files = Records(self._files, FileRecord)
        self.batches = Records(self._batches, BatchRecord.read)
        for batch in self.batches:
            if batch.ended:
                self.input(batch.id).unlink(missing_ok=True)

    def file_of(self, tenant: str, id: str) -> FileRecord:
        """Raises UnknownFile."""
        record = self.files.find(tenant, id)
        if record is None:
            raise UnknownFile(f"There is no file {id!r}.", remedy="GET /v1/files lists yours.")
        return record

    def batch_of(self, tenant: str, id: str) -> BatchRecord:
        """Raises UnknownBatch."""
        record = self.batches.find(tenant, id)
        if record is None:
            raise UnknownBatch(f"There is no batch {id!r}.", remedy="GET /v1/batches lists yours.")
        return record

    def content(self, file_id: str) -> Path:
        """Where the file's content is, or shall be."""
        return self._files / f"{file_id}.jsonl"

    def draft(self, file_id: str) -> Path:
        """Where the content is while it arrives."""
        return self._files / f"{file_id}.part"

    def input(self, batch_id: str) -> Path:
        """Where the batch's own link to its input is, so that the file may be deleted while the batch runs."""
        return self._batches / f"{batch_id}.input.jsonl"


@contextmanager
def opened_folder(path: Path) -> Iterator[BatchFolder]:
    """The folder, made where it is not there, for this process alone. Raises ConfigError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what all tenants ask
        lock = (path / "lock").open("w")
    except OSError as error:
        raise _unusable(path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by whatever ends this process
        except BlockingIOError:
            raise ConfigError(
                f"batches.folder: another router uses {path}, and would run its batches a second time.",
                remedy="Give each router a folder of its own.",
            ) from None
        try:
            folder = BatchFolder(path)
        except OSError as error:
            raise _unusable(path, error) from error
        yield folder


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"batches.folder: {path} cannot be used: {error.strerror}.",
        remedy="Name a folder that the router may write to.",
    )


def _stored(path: Path, read: Callable[..., R]) -> R | None:
    try:
        return read(**orjson.loads(path.read_bytes()))
    except (ValueError, TypeError, KeyError) as error:
        log.warning("%s is left aside, as it cannot be read: %s", path, error)
        return None
