"""One batch, from where it stands to its end."""

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Final

from shell_router.api.batch.disk import on_disk
from shell_router.api.batch.ending import UNANSWERED, list_unanswered, output_files
from shell_router.api.batch.folder import BatchFolder
from shell_router.api.batch.lines import LineRunner, checked, lines_left
from shell_router.api.batch.records import BatchRecord, Fault, Status
from shell_router.api.batch.results import LineResult, Results
from shell_router.api.services import Services
from shell_router.errors import StorageFailed

INTERNAL_FAULT: Final = Fault("internal_error", "Something went wrong inside the router; its log has the details.")

log = logging.getLogger(__name__)


class BatchRun:
    """Takes one batch to its end.

    Cancelled as a task it leaves the batch as it stands, and another run goes on from there.
    """

    def __init__(
        self, folder: BatchFolder, batch_id: str, runner: LineRunner, services: Services, most_line_bytes: int
    ) -> None:
        self._folder = folder
        self._id = batch_id
        self._runner = runner
        self._services = services
        self._most_line_bytes = most_line_bytes
        self._input = folder.input(batch_id)
        self._results = Results(folder.content(self._record.output_name), folder.content(self._record.errors_name))
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
        if outcome != "cancelled":  # what it will end as is kept before the lines without an answer are listed
            await self._folder.batches.save(self._moved(outcome).moved("finalizing", self._now()))
        if outcome in UNANSWERED and self._record.total:
            left = lines_left(self._input, self._record.endpoint, self._results)
            await list_unanswered(left, self._results, UNANSWERED[outcome], self._services.new_id)
        await self._end(outcome)

    async def _worked_off(self) -> tuple[Fault, ...]:
        """Return when all lines are answered, when the batch is cut or expires, or with its input's faults."""
        try:
            async with asyncio.timeout_at(self._end_at()) as limit:
                self._limit = limit
                return await self._checked() or await self._answered()
        except TimeoutError:
            if not limit.expired():
                raise
            return ()
        finally:
            self._limit = None

    def _end_at(self) -> float:
        """The loop's time after which nothing may run."""
        now = asyncio.get_running_loop().time()
        cancelling = self._record.status == "cancelling"
        return now if cancelling else now + self._record.expires_at - self._services.wall()

    async def _checked(self) -> tuple[Fault, ...]:
        """The input's faults; an input that an earlier run has checked has none."""
        if self._record.status != "validating":
            return ()
        found = await checked(self._input, self._record.endpoint, self._most_line_bytes)
        if not found.faults and self._record.status == "validating":
            await self._folder.batches.save(replace(self._moved("in_progress"), total=found.total))
        return found.faults

    async def _answered(self) -> tuple[Fault, ...]:
        left = lines_left(self._input, self._record.endpoint, self._results)
        async with contextlib.aclosing(left):
            await self._runner.run(self._record.tenant, left, self._keep)
        return ()

    async def _keep(self, result: LineResult) -> None:
        await on_disk(self._results.add, (result,))
        self._services.metrics.batch_lines.labels("completed" if result.succeeded else "failed").inc()
        self._note_counts()

    def _note_counts(self) -> None:
        counted = replace(self._record, completed=self._results.completed, failed=self._results.failed)
        self._folder.batches.note(counted)

    def _outcome(self) -> Status:
        """What the batch ends as, now that nothing runs; a run that was killed while it ended may have found it."""
        record = self._record
        if record.status == "cancelling":
            return "cancelled"
        if "expired" in record.at:
            return "expired"
        return "completed" if 0 < record.total <= self._results.completed + self._results.failed else "expired"

    async def _end(self, status: Status, faults: tuple[Fault, ...] = ()) -> None:
        """Hand the results to the tenant. What cannot be stored still holds until the router is stopped."""
        self._note_counts()
        files = await on_disk(output_files, self._folder, self._record, self._now())
        made = {file.id for file in files}
        ended = replace(
            self._moved(status),
            faults=faults,
            output_file_id=self._record.output_name if self._record.output_name in made else None,
            error_file_id=self._record.errors_name if self._record.errors_name in made else None,
        )
        for file in files:
            self._folder.files.note(file)
        self._folder.batches.note(ended)
        self._services.metrics.batches_ended.labels(status).inc()
        log.info("%s %s: %d of %d lines answered", self._id, status, ended.completed, ended.total)
        for file in files:
            await self._folder.files.save(file)
        await self._folder.batches.save(ended)
        await on_disk(self._input.unlink, missing_ok=True)

    async def _give_up(self, fault: Fault) -> None:
        """Where not even that can be stored, the next start goes on with the batch."""
        log.error("%s is given up: %s", self._id, fault.message)
        try:
            await self._end("failed", (fault,))
        except StorageFailed:  # it has been logged
            if not self._record.ended:
                self._folder.batches.note(replace(self._moved("failed"), faults=(fault,)))

    def _moved(self, status: Status) -> BatchRecord:
        return self._record.moved(status, self._now())

    def _now(self) -> int:
        return int(self._services.wall())
