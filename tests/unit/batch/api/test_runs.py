"""The life of batches, with a scripted runner."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shell_router.api import Services
from shell_router.app.fleet_changes import FleetChanges
from shell_router.batch.api.lines import BatchLine, LineResult
from shell_router.batch.api.run import BatchRuns
from shell_router.batch.api.runner import Keep
from shell_router.batch.api.storage import (
    BatchFolder,
    BatchRecord,
    FileRecord,
    Status,
    open_folder,
)
from shell_router.errors import BatchEnded, StorageFailed
from tests.fakes.api_server import ENDPOINT, jsonl, line, live
from tests.fakes.moa import ScriptedMoa

NOW = 1000
BATCH = BatchRecord("batch_1", "alice", "file-1", ENDPOINT, "24h", NOW, NOW + 3600)


class Answering:
    """Answers every line that is not answered, unless it has an `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.given: list[str] = []

    async def run(self, batch: BatchRecord, lines: AsyncIterator[BatchLine], keep: Keep) -> None:
        async for one in lines:
            if one.is_answered:
                continue
            self.given.append(one.custom_id)
            if self.error:
                raise self.error
            await keep(LineResult(one.custom_id, "r", 200, {}))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[BatchFolder]:
    """One that holds a file of two lines."""
    with open_folder(tmp_path) as folder:
        content = jsonl(line("a"), line("b"))
        folder.content("file-1").write_bytes(content)
        folder.files.note(FileRecord("file-1", "alice", "in.jsonl", "batch", len(content), NOW))
        yield folder


def runs(folder: BatchFolder, runner: Answering, now: float = NOW) -> BatchRuns:
    moa = ScriptedMoa()
    services = Services(
        moa.executor,
        moa.programs,
        live(moa.models),
        moa.models,
        {},
        FleetChanges({}, {}),
        wall=lambda: now,
    )
    return BatchRuns(folder, runner, services, max_line_bytes=2**20)


async def ended(folder: BatchFolder) -> BatchRecord:
    async with asyncio.timeout(60):  # every step of a batch is on the disk before the next one
        while not folder.batches["batch_1"].ended or len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 # nothing tells
            await asyncio.sleep(0)
    return folder.batches["batch_1"]


def left_as(folder: BatchFolder, status: Status, **changes: object) -> None:
    """A batch as another router left it."""
    folder.batches.note(replace(BATCH.enter_status(status, NOW), **changes))  # type: ignore[arg-type]
    folder.input("batch_1").write_bytes(folder.content("file-1").read_bytes())


@pytest.mark.parametrize(
    ("status", "error", "end"),
    [
        ("in_progress", None, "completed"),
        ("in_progress", ValueError("a fault"), "failed"),
        ("cancelling", None, "cancelled"),
    ],
)
async def test_whatever_a_batch_ends_as_its_input_and_its_pools_runs_are_deleted_and_no_others(
    folder: BatchFolder, status: Status, error: Exception | None, end: Status
) -> None:
    left_as(folder, status, total=2)
    for id in ("batch_1", "batch_2"):
        (folder.pools / id / "panel").mkdir(parents=True)
    runs(folder, Answering(error)).resume()
    assert (await ended(folder)).status == end
    assert [one.name for one in folder.pools.iterdir()] == ["batch_2"] and not folder.input(
        "batch_1"
    ).exists()


async def test_a_batch_that_comes_after_the_stop_waits_for_the_next_start(
    folder: BatchFolder,
) -> None:
    runner = Answering()
    stopped = runs(folder, runner)
    await stopped.stop()
    await stopped.add(BATCH)
    assert not asyncio.all_tasks() - {asyncio.current_task()}
    runs(folder, runner).resume()
    assert (await ended(folder)).status == "completed"


async def test_a_batch_counts_and_may_be_cancelled_before_it_is_on_disk(
    folder: BatchFolder,
) -> None:
    runner = Answering()
    begun = runs(folder, runner)
    adding = asyncio.ensure_future(begun.add(BATCH))
    await asyncio.sleep(0)
    assert folder.batches.of("alice") == [BATCH]
    await begun.cancel(BATCH)
    await adding
    assert ((await ended(folder)).status, runner.given) == ("cancelled", [])


async def test_a_batch_that_cannot_be_taken_on_leaves_nothing(folder: BatchFolder) -> None:
    folder.content("file-1").unlink()
    with pytest.raises(StorageFailed):
        await runs(folder, Answering()).add(BATCH)
    assert not list(folder.batches) and not folder.input("batch_1").exists()


async def test_a_batch_cancelled_before_its_input_was_checked_names_no_lines(
    folder: BatchFolder,
) -> None:
    left_as(folder, "cancelling")
    runs(folder, Answering()).resume()
    record = await ended(folder)
    assert (record.status, record.error_file_id) == ("cancelled", None)


async def test_a_batch_that_was_killed_while_it_expired_is_expired(folder: BatchFolder) -> None:
    left_as(folder, "finalizing", total=2, at={"expired": NOW, "finalizing": NOW})
    late = b"".join(
        LineResult(name, "r", error={"code": "batch_expired"}).as_line() for name in "ab"
    )
    folder.content("file-1-errors").write_bytes(late)
    runs(folder, Answering(), now=NOW + 3601).resume()
    assert (await ended(folder)).status == "expired"


async def test_a_batch_that_was_killed_when_all_was_answered_is_completed_however_late(
    folder: BatchFolder,
) -> None:
    left_as(folder, "in_progress", total=2)
    answers = b"".join(LineResult(name, "r", 200, {}).as_line() for name in "ab")
    folder.content("file-1-output").write_bytes(answers)
    runner = Answering()
    runs(folder, runner, now=NOW + 3601).resume()
    assert ((await ended(folder)).status, runner.given) == ("completed", [])


async def test_a_batch_that_is_ending_is_not_cancelled(folder: BatchFolder) -> None:
    with pytest.raises(BatchEnded, match="The batch is finalizing"):
        await runs(folder, Answering()).cancel(BATCH.enter_status("finalizing", NOW))


async def test_a_fault_of_the_router_fails_the_batch_and_gives_nothing_away(
    folder: BatchFolder,
) -> None:
    await runs(folder, Answering(ValueError("secret"))).add(BATCH)
    record = await ended(folder)
    (fault,) = record.faults
    assert (record.status, fault.code) == (
        "failed",
        "internal_error",
    ) and "secret" not in fault.message


async def test_an_end_that_cannot_be_stored_holds_until_the_next_start_which_goes_on(
    folder: BatchFolder, tmp_path: Path
) -> None:
    left_as(folder, "in_progress", total=2)
    await folder.batches.save(folder.batches["batch_1"])
    in_the_way = tmp_path / "batches" / "batch_1.tmp"
    in_the_way.mkdir()
    runs(folder, Answering()).resume()
    record = await ended(folder)
    assert (record.status, record.faults[0].code) == ("failed", "storage_failed")
    assert record.output_file_id == "file-1-output" and folder.files.find("alice", "file-1-output")
    in_the_way.rmdir()
    again, runner = BatchFolder(tmp_path), Answering()
    runs(again, runner).resume()
    assert ((await ended(again)).status, runner.given) == ("completed", [])


async def test_a_batch_whose_files_cannot_be_recorded_stays_completed_and_the_next_start_records_them(
    folder: BatchFolder, tmp_path: Path
) -> None:
    left_as(folder, "in_progress", total=2)
    await folder.batches.save(folder.batches["batch_1"])
    in_the_way = tmp_path / "files" / "file-1-output.tmp"
    in_the_way.mkdir()
    begun = runs(folder, Answering())
    begun.resume()
    seen = (await ended(folder)).status
    assert (seen, folder.batches["batch_1"].faults) == ("completed", ())
    counted = begun.services.metrics.registry.get_sample_value
    ends = {
        end: counted("shell_router_batches_ended_total", {"status": end}) or 0
        for end in ("completed", "failed")
    }
    assert ends == {"completed": 1, "failed": 0}
    in_the_way.rmdir()
    again = BatchFolder(tmp_path)
    assert again.batches["batch_1"].status == "finalizing"
    runs(again, Answering()).resume()
    assert (await ended(again)).output_file_id == "file-1-output" and again.files.find(
        "alice", "file-1-output"
    )
