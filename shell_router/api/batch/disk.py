"""Disk work beside the event loop."""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from shell_router.errors import StorageFailed

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


async def on_disk(step: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Do a blocking `step` in a thread; an OSError becomes StorageFailed.

    A caller that is cancelled waits until the step has ended: whoever cleans up or begins anew finds the disk at rest.
    """
    doing = asyncio.get_running_loop().run_in_executor(None, functools.partial(step, *arguments, **named))
    try:
        await asyncio.wait([doing])
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        doing.exception()  # read, or asyncio would report it as lost
        raise
    try:
        return doing.result()
    except OSError as error:
        log.error("the folder of the batches failed: %s", error)
        raise StorageFailed(
            f"The router could not read or write its files: {error.strerror or type(error).__name__}.",
            remedy="Its operator should free space in batches.folder, or make it readable and writable.",
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """All of `content` stands in `path` afterwards, or what stood there before does."""
    draft = path.with_suffix(".tmp")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def append_whole(path: Path, content: bytes) -> None:
    """Add all of `content` at the end of `path`, or nothing of it."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError:
        with contextlib.suppress(OSError):  # the first one says what is wrong
            os.truncate(path, size)
        raise


def keep_as(draft: Path, path: Path) -> None:
    """Have `draft`, once it is on the disk for good, stand as `path`."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def link_or_copy(source: Path, target: Path) -> None:
    """Have `target` hold what `source` holds, even when that is deleted."""
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # not every file system has links
        shutil.copyfile(source, target)
