"""The batches that one router runs, each from where it stands to its end."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Final

from shell_router.api.services import Services
from shell_router.batch.api.lines import BatchLine, LineResult, Results, checked, lines_of
from shell_router.batch.api.runner import ChatLines
from shell_router.batch.api.storage import (
    OUTPUT_PURPOSE,
    BatchFolder,
    BatchRecord,
    Fault,
    FileRecord,
    Status,
    link_or_copy,
    on_disk,
)
from shell_router.errors import BatchEnded, StorageFailed

log = logging.getLogger(__name__)

INTERNAL_FAULT: Final = Fault(
    "internal_error", "Something went wrong inside the router; its log has the details."
)
UNANSWERED: dict[Status, dict[str, str]] = {
    "cancelled": {
        "code": "batch_cancelled",
        "message": "The batch was cancelled before this line was answered.",
    },
    "expired": {
        "code": "batch_expired",
        "message": "The batch expired before this line was answered.",
    },
}
LISTED_AT_ONCE = 1000
EXPIRY_CHECK_S = 60.0


class BatchRun:
    """Takes one batch to its end. Cancelled, it leaves the batch as it is, and another run goes on
    from there.
    """

    def __init__(self, runs: "BatchRuns", batch_id: str) -> None:
        self._folder = folder = runs.folder
        self._services = runs.services
        self._runs = runs
        self._id = batch_id
        self._input = folder.input(batch_id)
        self._results = Results(
            folder.content(self._record.output_name), folder.content(self._record.errors_name)
        )
        self._limit: asyncio.Timeout | None = None

    @property
    def _record(self) -> BatchRecord:
        return self._folder.batches[self._id]

    def cut(self) -> None:
        """End the running lines; the batch goes to its end without them."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def live(self) -> None:
        """Run. Whatever goes wrong becomes the batch's status."""
        try:
            await self._to_its_end()
        except StorageFailed as error:
            await self._give_up(Fault("storage_failed", str(error)))
        except Exception:
            log.exception("%s failed", self._id)
            await self._give_up(INTERNAL_FAULT)

    async def _to_its_end(self) -> None:
        await on_disk(self._results.recover)
        self._note_counts()
        faults = await self._worked_off()
        if faults:
            await self._end("failed", faults)
            return
        outcome = self._outcome()
        if (
            outcome != "cancelled"
        ):  # what it will end as is kept before the lines without an answer are listed
            await self._folder.batches.save(self._moved(outcome).moved("finalizing", self._now()))
        if outcome in UNANSWERED and self._record.total:
            await self._list_unanswered(UNANSWERED[outcome])
        await self._end(outcome)

    async def _list_unanswered(self, error: dict[str, str]) -> None:
        """Name the lines that are left in the error file, so that their owner can send them
        again."""
        waiting: list[LineResult] = []
        async with contextlib.aclosing(self._lines()) as lines:
            async for line in lines:
                if not line.is_answered:
                    waiting.append(LineResult(line.custom_id, self._services.new_id(), error=error))
                if len(waiting) == LISTED_AT_ONCE:
                    await on_disk(self._results.add, waiting)
                    waiting = []
        await on_disk(self._results.add, waiting)

    async def _worked_off(self) -> tuple[Fault, ...]:
        """Return when all lines are answered, when the batch is cut or expires, or with its input's
        faults.
        """
        try:
            left_s = (
                (0)
                if (self._record.status == "cancelling")
                else (self._record.expires_at - self._services.wall())
            )
            async with asyncio.timeout(left_s) as limit:
                self._limit = limit
                if self._record.status == "validating" and (faults := await self._checked()):
                    return faults
                async with contextlib.aclosing(self._lines()) as lines:
                    await self._runs.runner.run(self._record, lines, self._keep)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._limit = None
        return ()

    async def _checked(self) -> tuple[Fault, ...]:
        """The input's faults. Without any the batch is in progress, and no later run checks it
        again.
        """
        total, faults = await checked(self._input, self._record.endpoint, self._runs.max_line_bytes)
        if not faults and self._record.status == "validating":
            await self._folder.batches.save(replace(self._moved("in_progress"), total=total))
        return faults

    def _lines(self) -> AsyncGenerator[BatchLine, None]:
        return lines_of(self._input, self._record.endpoint, self._results)

    async def _keep(self, result: LineResult) -> None:
        await on_disk(self._results.add, (result,))
        self._services.metrics.batch_lines.labels(
            "completed" if result.succeeded else "failed"
        ).inc()
        self._note_counts()

    def _note_counts(self) -> None:
        self._folder.batches.note(
            replace(self._record, completed=self._results.completed, failed=self._results.failed)
        )

    def _outcome(self) -> Status:
        """What the batch ends as, now that nothing runs; a run that was killed while it ended may
        have found it.
        """
        record = self._record
        if record.status == "cancelling":
            return "cancelled"
        if "expired" in record.at:
            return "expired"
        if 0 < record.total <= self._results.completed + self._results.failed:
            return "completed"
        return "expired"

    async def _end(self, status: Status, faults: tuple[Fault, ...] = ()) -> None:
        """Hand the results to the tenant. What cannot be stored still holds until the router is
        stopped.
        """
        self._note_counts()
        files = await on_disk(self._files)
        output = self._record.output_name
        errors = self._record.errors_name
        made = {file.id for file in files}
        ended = replace(
            self._moved(status),
            faults=faults,
            output_file_id=output if output in made else None,
            error_file_id=errors if errors in made else None,
        )
        for file in files:
            self._folder.files.note(file)
        self._folder.batches.note(ended)
        self._services.metrics.batches_ended.labels(status).inc()
        log.info("%s %s: %d of %d lines answered", self._id, status, ended.completed, ended.total)
        for file in files:
            await self._folder.files.save(file)
        await self._folder.batches.save(ended)
        await on_disk(self._folder.clear, self._id)

    def _files(self) -> list[FileRecord]:
        """The files of the results that are not empty."""
        batch = self._record
        found = []
        for id, kind in ((batch.output_name, "output"), (batch.errors_name, "errors")):
            path = self._folder.content(id)
            if size := path.stat().st_size if path.exists() else 0:
                name = f"{batch.id}_{kind}.jsonl"
                kept_s = self._runs.file_ttl_s
                found.append(
                    FileRecord.made(
                        id, batch.tenant, name, OUTPUT_PURPOSE, size, self._now(), kept_s
                    )
                )
        return found

    async def _give_up(self, fault: Fault) -> None:
        """If that cannot be stored either, the next start goes on with the batch, as with an end
        that was noted.
        """
        log.error("%s is given up: %s", self._id, fault.message)
        if self._record.ended:  # a client may have seen it
            return
        try:
            await self._end("failed", (fault,))
        except StorageFailed:  # it has been logged
            if not self._record.ended:
                self._folder.batches.note(replace(self._moved("failed"), faults=(fault,)))

    def _moved(self, status: Status) -> BatchRecord:
        return self._record.moved(status, self._now())

    def _now(self) -> int:
        return int(self._services.wall())


@dataclass(slots=True)
class BatchRuns:
    """Runs the batches of `folder`, each as a task. No line may be longer than `max_line_bytes`.

    Files expire `file_ttl_s` after they were made; with None they do not.
    """

    folder: BatchFolder
    runner: ChatLines
    services: Services
    max_line_bytes: int
    file_ttl_s: float | None = None
    _running: dict[str, tuple[BatchRun, asyncio.Task[None]]] = field(default_factory=dict)
    _stopped: bool = False

    def resume(self) -> None:
        """Go on with every batch that has not ended."""
        for record in self.folder.batches:
            if not record.ended:
                log.info("%s goes on: it was %s", record.id, record.status)
                self._begin(record.id)

    async def add(self, record: BatchRecord) -> None:
        """Take on a new batch. Raises StorageFailed, and then nothing of it is left."""
        link = self.folder.input(record.id)
        self.folder.batches.note(record)  # before any wait: it counts at once, and may be cancelled
        try:
            await on_disk(link_or_copy, self.folder.content(record.input_file_id), link)
            await self.folder.batches.save(self.folder.batches[record.id])
        except (
            StorageFailed,
            asyncio.CancelledError,
        ):  # or the client left, and knows no id to ask for
            with contextlib.suppress(StorageFailed):  # the first one says what is wrong
                await self.folder.batches.remove(record.id)
                await on_disk(link.unlink, missing_ok=True)
            raise
        self._begin(record.id)

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """The batch, which from now on is cancelling. Raises BatchEnded; StorageFailed, though it
        is cancelled.
        """
        if record.status in ("cancelling", "cancelled"):
            return record
        if record.ended or record.status == "finalizing":
            raise BatchEnded(
                f"The batch is {record.status}, so it cannot be cancelled.",
                remedy="Read its files instead.",
            )
        cancelling = record.moved("cancelling", int(self.services.wall()))
        self.folder.batches.note(cancelling)
        if record.id in self._running:
            self._running[record.id][0].cut()
        await self.folder.batches.save(cancelling)
        return cancelling

    async def expire_files(self) -> None:
        """Delete files as they expire, for ever."""
        while True:
            try:
                await self.folder.remove_expired(self.services.wall)
            except StorageFailed as error:
                log.error("files that have expired could not be deleted: %s", error)
            await asyncio.sleep(EXPIRY_CHECK_S)

    async def stop(self) -> None:
        """End all running lines. Their batches go on when a router is started on this folder
        again."""
        self._stopped = True
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            log.info("%d batches stop, to go on with the next start", len(tasks))
            await asyncio.wait(tasks)

    def _begin(self, id: str) -> None:
        if self._stopped:  # the next start will
            return
        run = BatchRun(self, id)
        task = asyncio.create_task(run.live(), name=id)
        self._running[id] = run, task
        task.add_done_callback(functools.partial(self._ended, id))

    def _ended(self, id: str, task: "asyncio.Task[None]") -> None:
        del self._running[id]
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended badly", id, exc_info=error)
