"""Who may hold KV now: a first-come queue under a token budget and a limit on requests."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Admission:
    """Grants tokens in order of arrival. One event loop only.

    Whoever asks for more than `max_tokens` would wait for ever; callers refuse such requests before.
    """

    def __init__(self, *, max_tokens: int, max_requests: int) -> None:
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.used_tokens = 0
        self.holders = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def hold(self, tokens: int) -> AsyncIterator[None]:
        """Wait for a turn, then hold `tokens` for the length of the block."""
        await self._turn(tokens)
        try:
            yield
        finally:
            self.used_tokens -= tokens
            self.holders -= 1
            self._grant()

    async def _turn(self, tokens: int) -> None:
        entry = (tokens, asyncio.get_running_loop().create_future())
        self._queue.append(entry)
        self._grant()
        try:
            await entry[1]
        except asyncio.CancelledError:
            self._leave(entry)
            raise

    def _leave(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        """Undo a wait that was cancelled, before or just after its turn came."""
        tokens, turn = entry
        if turn.cancelled():
            self._queue.remove(entry)
        else:
            self.used_tokens -= tokens
            self.holders -= 1
        self._grant()

    def _grant(self) -> None:
        while self._queue and self.holders < self.max_requests:
            tokens, turn = self._queue[0]
            if turn.cancelled():
                return  # its own task is about to leave the queue and grant again
            if self.used_tokens + tokens > self.max_tokens:
                return
            self._queue.popleft()
            self.used_tokens += tokens
            self.holders += 1
            turn.set_result(None)
