"""Files that may change while the router runs: topologies, API keys and certificates."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from shell_router.errors import ShellRouterError

log = logging.getLogger(__name__)

Contents = Mapping[Path, bytes | None] | str
"""What each file holds, None for one that cannot be read; or why not even their folder can be
listed.
"""


def contents_of(files: Callable[[], Iterable[Path]]) -> Contents:
    """What the files hold that `files` gives now."""
    try:
        return {file: _content(file) for file in files()}
    except OSError as error:
        return str(error)


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


class Reread:
    """Files that hold `seen`, and what is done once they hold something else.

    `files` gives those that are there now, `take` reads them again. Where it raises, what was
    before has to stay. The contents decide: links may lead elsewhere, and not every file system
    reports changes.
    """

    def __init__(
        self,
        what: str,
        files: Callable[[], Iterable[Path]],
        take: Callable[[], Awaitable[None]],
        seen: Contents | None = None,
    ) -> None:
        self._what = what
        self._files = files
        self._take = take
        self._seen = contents_of(files) if seen is None else seen

    async def look(self) -> None:
        """Read the files, and take what they hold if it is something else. What fails is logged."""
        found = await asyncio.to_thread(contents_of, self._files)
        if found == self._seen:
            return
        self._seen = found
        try:
            if isinstance(found, str):
                raise OSError(found)
            await self._take()
        except (ShellRouterError, OSError) as error:
            log.error("%s: changed, and what was before stays: %s", self._what, error)
        except Exception:  # the task that looks must go on
            log.exception("%s: changed, and what was before stays", self._what)
        else:
            log.info("%s: changed, and read again", self._what)

    @asynccontextmanager
    async def watched(self, look_s: float = 1.0) -> AsyncIterator[None]:
        """Look every `look_s` while the context is open."""
        watching = asyncio.create_task(self._watch(look_s), name=f"watch-{self._what}")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self, look_s: float) -> None:
        while True:
            await asyncio.sleep(look_s)
            await self.look()
