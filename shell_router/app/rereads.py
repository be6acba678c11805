"""Files that may change while the router runs: topologies, API keys and certificates."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from shell_router.errors import ShellRouterError

log = logging.getLogger(__name__)

Contents = Mapping[Path, bytes | None] | str
"""The content of each file, None for an unreadable one; or why not even their folder can be listed.
"""


def read_contents(files: Callable[[], Iterable[Path]]) -> Contents:
    """Read the files that `files` gives now."""
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
    """Files, and the action once their contents change.

    The contents decide: links may lead elsewhere, and not every file system reports changes.

    Args:
        what: The name in logs.
        files: Gives the files that exist now.
        take: Reads them again. If it raises, the previous state must stay.
        seen: Their contents at the start.
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
        self._seen = read_contents(files) if seen is None else seen

    async def look(self) -> None:
        """Read the files, and take their contents if they changed; failures are logged."""
        contents = await asyncio.to_thread(read_contents, self._files)
        if contents == self._seen:
            return
        self._seen = contents
        try:
            if isinstance(contents, str):
                raise OSError(contents)
            await self._take()
        except (ShellRouterError, OSError) as error:
            log.error("%s: changed, and what was before stays: %s", self._what, error)
        except Exception:  # the task that looks must go on
            log.exception("%s: changed, and what was before stays", self._what)
        else:
            log.info("%s: changed, and read again", self._what)

    @asynccontextmanager
    async def watch(self, look_s: float = 1.0) -> AsyncIterator[None]:
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
