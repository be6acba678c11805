"""The batches that one router runs, each as a task from its current status to its end."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Final

from shell_router.api.services import Services
from shell_router.batch.api.lines import BatchLine, LineResult, Results, check_input, read_lines
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
    """A batch on its way to its end.

    Cancelled, it leaves the batch as it is, and another run continues from there.
    """

    def __init__(self, runs: "BatchRuns", batch_id: str) -> None:
        self._folder = folder = runs.folder
        self._services = runs.services
        self._runs = runs
        self._id = batch_id
        self._input = folder.input(batch_id)
        self._results = Results(
            folder.content(self._record.output_id), folder.content(self._record.errors_id)
        )
        self._limit: asyncio.Timeout | None = None

    @property
    def _record(self) -> BatchRecord:
        return self._folder.batches[self._id]

    def abort_lines(self) -> None:
        """Abort the running lines; the batch goes to its end without them."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Take the batch to its end. A failure becomes the batch's status."""
        try:
            await self._advance()
        except StorageFailed as error:
            await self._give_up(Fault("storage_failed", str(error)))
        except Exception:
            log.exception("%s failed", self._id)
            await self._give_up(INTERNAL_FAULT)

    async def _advance(self) -> None:
        await on_disk(self._results.recover)
        self._note_counts()
        faults = await self._answer_lines()
        if faults:
            await self._end("failed", faults)
            return
        outcome = self._choose_outcome()
        if outcome != "cancelled":
            # saved first: a run that is killed while it lists lines must end the same way
            record = self._enter_status(outcome)
            await self._folder.batches.save(record.enter_status("finalizing", self._now()))
        if outcome in UNANSWERED and self._record.total:
            await self._list_unanswered(UNANSWERED[outcome])
        await self._end(outcome)

    async def _list_unanswered(self, error: dict[str, str]) -> None:
        """List the lines that are left in the error file, for their owner to send again."""
        waiting: list[LineResult] = []
        async with contextlib.aclosing(self._lines()) as lines:
            async for line in lines:
                if not line.is_answered:
                    waiting.append(LineResult(line.custom_id, self._services.new_id(), error=error))
                if len(waiting) == LISTED_AT_ONCE:
                    await on_disk(self._results.add, waiting)
                    waiting = []
        await on_disk(self._results.add, waiting)

    async def _answer_lines(self) -> tuple[Fault, ...]:
        """Run until all lines are answered, or the batch is aborted or expires.

        Returns the input's faults; with any, no line runs.
        """
        left_s = self._record.expires_at - self._services.wall()
        if self._record.status == "cancelling":
            left_s = 0.0
        try:
            async with asyncio.timeout(left_s) as limit:
                self._limit = limit
                is_new = self._record.status == "validating"
                if is_new and (faults := await self._check_input()):
                    return faults
                async with contextlib.aclosing(self._lines()) as lines:
                    await self._runs.runner.run(self._record, lines, self._keep)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._limit = None
        return ()

    async def _check_input(self) -> tuple[Fault, ...]:
        """Return the input's faults; without any, move the batch on, so that it is checked once."""
        total, faults = await check_input(
            self._input, self._record.endpoint, self._runs.max_line_bytes
        )
        if not faults and self._record.status == "validating":
            record = replace(self._enter_status("in_progress"), total=total)
            await self._folder.batches.save(record)
        return faults

    def _lines(self) -> AsyncGenerator[BatchLine, None]:
        return read_lines(self._input, self._record.endpoint, self._results)

    async def _keep(self, result: LineResult) -> None:
        await on_disk(self._results.add, (result,))
        outcome = "completed" if result.succeeded else "failed"
        self._services.metrics.batch_lines.labels(outcome).inc()
        self._note_counts()

    def _note_counts(self) -> None:
        self._folder.batches.note(
            replace(self._record, completed=self._results.completed, failed=self._results.failed)
        )

    def _choose_outcome(self) -> Status:
        """Return the final status, now that no line runs; a killed run may have saved one."""
        record = self._record
        if record.status == "cancelling":
            return "cancelled"
        if "expired" in record.at:
            return "expired"
        if 0 < record.total <= self._results.completed + self._results.failed:
            return "completed"
        return "expired"

    async def _end(self, status: Status, faults: tuple[Fault, ...] = ()) -> None:
        """Hand the results to the tenant. If storing them fails, they hold until the next start."""
        self._note_counts()
        output = await on_disk(self._describe_results, self._record.output_id, "output")
        errors = await on_disk(self._describe_results, self._record.errors_id, "errors")
        files = [file for file in (output, errors) if file is not None]
        ended = replace(
            self._enter_status(status),
            faults=faults,
            output_file_id=output.id if output else None,
            error_file_id=errors.id if errors else None,
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

    def _describe_results(self, file_id: str, kind: str) -> FileRecord | None:
        """Return the record of a file of results; None if the file is empty."""
        batch = self._record
        path = self._folder.content(file_id)
        size = path.stat().st_size if path.exists() else 0
        if not size:
            return None
        name = f"{batch.id}_{kind}.jsonl"
        ttl_s = self._runs.file_ttl_s
        return FileRecord.create(
            file_id, batch.tenant, name, OUTPUT_PURPOSE, size, self._now(), ttl_s
        )

    async def _give_up(self, fault: Fault) -> None:
        """Fail the batch. If that cannot be stored either, the next start resumes the batch."""
        log.error("%s is given up: %s", self._id, fault.message)
        if self._record.ended:  # a client may have seen it
            return
        try:
            await self._end("failed", (fault,))
        except StorageFailed:  # it has been logged
            if not self._record.ended:
                self._folder.batches.note(replace(self._enter_status("failed"), faults=(fault,)))

    def _enter_status(self, status: Status) -> BatchRecord:
        return self._record.enter_status(status, self._now())

    def _now(self) -> int:
        return int(self._services.wall())


@dataclass(slots=True)
class BatchRuns:
    """The running batches of `folder`, each a task. No line may exceed `max_line_bytes`.

    Files expire `file_ttl_s` after their creation; with None they do not.
    """

    folder: BatchFolder
    runner: ChatLines
    services: Services
    max_line_bytes: int
    file_ttl_s: float | None = None
    _running: dict[str, tuple[BatchRun, asyncio.Task[None]]] = field(default_factory=dict)
    _stopped: bool = False

    def resume(self) -> None:
        """Continue every batch that has not ended."""
        for record in self.folder.batches:
            if not record.ended:
                log.info("%s goes on: it was %s", record.id, record.status)
                self._begin(record.id)

    async def add(self, record: BatchRecord) -> None:
        """Start a new batch. Raises StorageFailed, and then leaves nothing of it."""
        link = self.folder.input(record.id)
        self.folder.batches.note(record)  # before any wait: it counts at once, and may be cancelled
        try:
            await on_disk(link_or_copy, self.folder.content(record.input_file_id), link)
            await self.folder.batches.save(self.folder.batches[record.id])
        except (StorageFailed, asyncio.CancelledError):
            # a client that left knows no id, so the batch goes; the first error says what is wrong
            with contextlib.suppress(StorageFailed):
                await self.folder.batches.remove(record.id)
                await on_disk(link.unlink, missing_ok=True)
            raise
        self._begin(record.id)

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """Cancel the batch and return its record.

        Raises:
            BatchEnded: The batch has ended or is ending.
            StorageFailed: The batch is cancelled, but not for the next start.
        """
        if record.status in ("cancelling", "cancelled"):
            return record
        if record.ended or record.status == "finalizing":
            raise BatchEnded(
                f"The batch is {record.status}, so it cannot be cancelled.",
                remedy="Read its files instead.",
            )
        cancelling = record.enter_status("cancelling", int(self.services.wall()))
        self.folder.batches.note(cancelling)
        if record.id in self._running:
            self._running[record.id][0].abort_lines()
        await self.folder.batches.save(cancelling)
        return cancelling

    async def expire_files(self) -> None:
        """Delete files as they expire, until cancelled."""
        while True:
            try:
                await self.folder.remove_expired(self.services.wall)
            except StorageFailed as error:
                log.error("files that have expired could not be deleted: %s", error)
            await asyncio.sleep(EXPIRY_CHECK_S)

    async def stop(self) -> None:
        """Abort all running lines. Their batches continue at the folder's next start."""
        self._stopped = True
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            log.info("%d batches stop, to go on with the next start", len(tasks))
            await asyncio.wait(tasks)

    def _begin(self, id: str) -> None:
        if self._stopped:  # the next start begins the batch
            return
        run = BatchRun(self, id)
        task = asyncio.create_task(run.run(), name=id)
        self._running[id] = run, task
        task.add_done_callback(functools.partial(self._forget_task, id))

    def _forget_task(self, id: str, task: "asyncio.Task[None]") -> None:
        del self._running[id]
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended badly", id, exc_info=error)
