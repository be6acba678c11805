"""What an ending batch leaves behind: an error for each line that has no answer, and the files of its results."""

import contextlib
from collections.abc import AsyncGenerator, Callable

from shell_router.api.batch.disk import on_disk
from shell_router.api.batch.folder import BatchFolder
from shell_router.api.batch.lines import BatchLine
from shell_router.api.batch.records import OUTPUT_PURPOSE, BatchRecord, FileRecord, Status
from shell_router.api.batch.results import LineResult, Results

UNANSWERED: dict[Status, dict[str, str]] = {
    "cancelled": {"code": "batch_cancelled", "message": "The batch was cancelled before this line was answered."},
    "expired": {"code": "batch_expired", "message": "The batch expired before this line was answered."},
}
LISTED_AT_ONCE = 1000


async def list_unanswered(
    left: AsyncGenerator[BatchLine, None], results: Results, error: dict[str, str], new_id: Callable[[], str]
) -> None:
    """Name the lines that are `left` in the error file, so that their owner can send them again."""
    waiting: list[LineResult] = []
    async with contextlib.aclosing(left):
        async for line in left:
            waiting.append(LineResult(line.custom_id, new_id(), error=error))
            if len(waiting) == LISTED_AT_ONCE:
                await on_disk(results.add, waiting)
                waiting = []
    await on_disk(results.add, waiting)


def output_files(folder: BatchFolder, batch: BatchRecord, now: int) -> list[FileRecord]:
    """The files of the batch's results, as far as there are any."""
    found = []
    for id, kind in ((batch.output_name, "output"), (batch.errors_name, "errors")):
        path = folder.content(id)
        size = path.stat().st_size if path.exists() else 0
        if size:
            found.append(FileRecord(id, batch.tenant, f"{batch.id}_{kind}.jsonl", OUTPUT_PURPOSE, size, now))
    return found
