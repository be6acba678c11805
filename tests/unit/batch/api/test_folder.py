"""The folder of files and batches: one router's, and read again at its next start."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from shell_router.batch.api.storage import BatchRecord, Fault, FileRecord, open_folder
from shell_router.errors import ConfigError

FILE = FileRecord("file-1", "alice", "in.jsonl", "batch", 3, 100)
BATCH = BatchRecord(
    "batch_1",
    "alice",
    "file-1",
    "/v1/chat/completions",
    "24h",
    100,
    200,
    {"a": "b"},
    faults=(Fault("c", "m", 3),),
)


async def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        await folder.files.save(FILE)
        await folder.batches.save(BATCH.enter_status("in_progress", 150))
    with open_folder(tmp_path) as folder:
        assert folder.files.find("alice", "file-1") == FILE
        assert folder.batches.find("alice", "batch_1") == BATCH.enter_status("in_progress", 150)


async def test_what_was_only_noted_or_was_removed_is_not(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        folder.batches.note(BATCH)
        await folder.files.save(FILE)
        await folder.files.remove(FILE.id)
        assert folder.batches.find("alice", "batch_1") == BATCH
    with open_folder(tmp_path) as folder:
        assert not list(folder.batches) and not list(folder.files)


async def test_the_latest_come_first_also_after_a_start(tmp_path: Path) -> None:
    records = [replace(FILE, id=f"file-{place}", created_at=place) for place in (3, 1, 2)]
    with open_folder(tmp_path) as folder:
        for record in records:
            await folder.files.save(record)
    with open_folder(tmp_path) as folder:
        assert [one.created_at for one in folder.files.of("alice")] == [3, 2, 1]


async def test_a_start_deletes_what_a_batch_that_has_ended_left_behind(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        await folder.batches.save(BATCH.enter_status("in_progress", 150))
        await folder.batches.save(replace(BATCH, id="batch_2").enter_status("expired", 150))
        for id in ("batch_1", "batch_2"):
            folder.input(id).touch()
            (folder.pools / id).mkdir(parents=True)
    with open_folder(tmp_path) as folder:
        assert [one.name for one in folder.pools.iterdir()] == ["batch_1"]
        assert folder.input("batch_1").exists() and not folder.input("batch_2").exists()


async def test_a_record_that_cannot_be_read_is_left_aside_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_folder(tmp_path) as folder:
        await folder.files.save(FILE)
    broken = [tmp_path / "files" / name for name in ("a.json", "b.json", "c.json")]
    for path, content in zip(broken, (b"", b"{}", b"[1]"), strict=True):
        path.write_bytes(content)
    with open_folder(tmp_path) as folder:
        assert list(folder.files) == [FILE]
    assert all(f"{path} cannot be read and is skipped" in caplog.text for path in broken) and all(
        path.exists() for path in broken
    )


def test_a_new_folder_is_open_to_its_owner_alone(tmp_path: Path) -> None:
    with open_folder(tmp_path / "new" / "batches"):
        assert stat.S_IMODE((tmp_path / "new" / "batches").stat().st_mode) == 0o700


def test_a_second_router_is_refused(tmp_path: Path) -> None:
    with (
        open_folder(tmp_path),
        pytest.raises(ConfigError, match="Give each router a folder"),
        open_folder(tmp_path),
    ):
        pass
    with open_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"batches\.folder: .*/file cannot be used"),
        open_folder(tmp_path / "file"),
    ):
        pass
