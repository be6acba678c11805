"""Disk work outside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shell_router.batch.api.storage import keep_as, link_or_copy, on_disk
from shell_router.batch.journal import append_whole, replace_file
from shell_router.errors import StorageFailed


async def test_a_failing_disk_is_reported_with_its_reason_and_the_remedy() -> None:
    with pytest.raises(
        StorageFailed, match=r"No space left on device\. Its operator should free space"
    ):
        await on_disk(append_whole, Path("/dev/full"), b"x")


async def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        await on_disk(lambda: 1 // 0)


async def test_a_cancelled_caller_waits_until_the_disk_is_at_rest() -> None:
    begun, release, at_rest = threading.Event(), threading.Event(), []

    def step() -> None:
        begun.set()
        release.wait(10)
        at_rest.append(True)

    waiting = asyncio.ensure_future(on_disk(step))
    await asyncio.to_thread(begun.wait, 10)
    waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert at_rest


def test_a_file_is_replaced_as_a_whole_or_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    replace_file(path, b"old")
    (tmp_path / "record.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    replace_file(path, b"new")
    assert path.read_bytes() == b"new" and [one.name for one in tmp_path.iterdir()] == [
        "record.json"
    ]


@pytest.mark.parametrize(
    "keep", [lambda draft, path: replace_file(path, b"x"), keep_as], ids=["record", "upload"]
)
def test_what_the_disk_does_not_confirm_is_not_kept(
    tmp_path: Path, keep: Callable[[Path, Path], None]
) -> None:
    path, draft = tmp_path / "record.json", tmp_path / "record.tmp"
    draft.symlink_to("/dev/null")  # takes everything and cannot be synced
    with pytest.raises(OSError, match="Invalid argument"):
        keep(draft, path)
    assert not path.exists()


def test_a_link_holds_what_its_source_held(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x")
    link_or_copy(source, target)
    source.unlink()
    assert target.read_bytes() == b"x"


def test_where_there_are_no_links_a_copy_is_made(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    elsewhere = (
        Path("/dev/shm") / f"shell-router-{tmp_path.name}-{id(tmp_path)}"
    )  # another file system
    try:
        link_or_copy(source, elsewhere)
        assert elsewhere.read_bytes() == b"x"
    finally:
        elsewhere.unlink(missing_ok=True)
