"""Lines of text that the code under test tells, to be waited for."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 60.0


class Lines:
    """Takes a line per call."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, line: str) -> None:
        self._lines.put_nowait(line)

    async def with_words(self, words: str) -> str:
        """The next line that holds `words`; those before it are passed over."""
        async with asyncio.timeout(LIMIT_S):
            while words not in (line := await self._lines.get()):
                pass
        return line


class _Into(logging.Handler):
    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines(record.getMessage())


@contextmanager
def logged(name: str, lines: Lines) -> Iterator[None]:
    """While it is open, what the logger of that name and those below it say goes to `lines` too."""
    into = _Into(lines)
    logging.getLogger(name).addHandler(into)
    try:
        yield
    finally:
        logging.getLogger(name).removeHandler(into)
