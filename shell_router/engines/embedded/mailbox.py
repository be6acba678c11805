"""What the model's thread tells a request's task."""

import asyncio

from shell_router.engines.embedded.output import Piece


class Mailbox:
    """One output's pieces in order, taken in batches by one reader. One event loop only.

    The reader hears of the first piece at once, then of every `interval` more, and of the last, as in SGLang.
    """

    def __init__(self, interval: int = 1) -> None:
        self._pieces: list[Piece] = []
        self._interval = interval
        self._due = 1
        self._filled = asyncio.Event()

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if len(self._pieces) >= self._due or piece.finish_reason is not None:
            self._filled.set()

    async def take(self) -> list[Piece]:
        """Everything that came since the last call; waits until that is due."""
        await self._filled.wait()
        self._filled.clear()
        self._due = self._interval
        pieces, self._pieces = self._pieces, []
        return pieces
