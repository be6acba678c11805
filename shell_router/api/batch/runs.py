"""The batches that one router runs."""

import asyncio
import contextlib
import functools
import logging

from shell_router.api.batch.disk import link_or_copy, on_disk
from shell_router.api.batch.folder import BatchFolder
from shell_router.api.batch.lines import LineRunner
from shell_router.api.batch.records import BatchRecord
from shell_router.api.batch.run import BatchRun
from shell_router.api.services import Services
from shell_router.errors import BatchEnded, StorageFailed

log = logging.getLogger(__name__)


class BatchRuns:
    """Runs the batches of `folder`, each as a task. No line may be longer than `most_line_bytes`."""

    def __init__(self, folder: BatchFolder, runner: LineRunner, services: Services, most_line_bytes: int) -> None:
        self.folder = folder
        self._runner = runner
        self._services = services
        self._most_line_bytes = most_line_bytes
        self._running: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._stopped = False

    def resume(self) -> None:
        """Go on with every batch that has not ended."""
        for record in self.folder.batches:
            if not record.ended:
                log.info("%s goes on: it was %s", record.id, record.status)
                self._begin(record.id)

    async def add(self, record: BatchRecord) -> None:
        """Take on a new batch. Raises StorageFailed, and then nothing of it is left."""
        link = self.folder.input(record.id)
        try:
            await on_disk(link_or_copy, self.folder.content(record.input_file_id), link)
            await self.folder.batches.save(record)
        except (StorageFailed, asyncio.CancelledError):  # or the client left, and knows no id to ask for
            with contextlib.suppress(StorageFailed):  # the first one says what is wrong
                await self.folder.batches.remove(record.id)
                await on_disk(link.unlink, missing_ok=True)
            raise
        self._begin(record.id)

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """The batch, which from now on is cancelling. Raises BatchEnded; StorageFailed, though it is cancelled."""
        if record.status in ("cancelling", "cancelled"):
            return record
        if record.ended or record.status == "finalizing":
            raise BatchEnded(
                f"The batch is {record.status}, so it cannot be cancelled.", remedy="Read its files instead."
            )
        cancelling = record.moved("cancelling", int(self._services.wall()))
        self.folder.batches.note(cancelling)
        if record.id in self._running:
            self._running[record.id][0].cut()
        await self.folder.batches.save(cancelling)
        return cancelling

    async def stop(self) -> None:
        """End all running lines. Their batches go on when a router is started on this folder again."""
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
        run = BatchRun(self.folder, id, self._runner, self._services, self._most_line_bytes)
        task = asyncio.create_task(run.live(), name=id)
        self._running[id] = run, task
        task.add_done_callback(functools.partial(self._ended, id))

    def _ended(self, id: str, task: "asyncio.Task[None]") -> None:
        del self._running[id]
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended badly", id, exc_info=error)
