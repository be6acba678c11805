"""A pace for scripted engines by which a test decides who may go on."""

import asyncio


class Gates:
    """Requests whose id ends with a held name wait; all others run at once."""

    def __init__(self, *held: str) -> None:
        self._gates = {name: asyncio.Event() for name in held}
        self.waiting: list[str] = []
        self._arrived = asyncio.Event()

    def open(self, name: str) -> None:
        """Let requests of `name` go on, now and later."""
        self._gates[name].set()

    async def pace(self, rid: str, piece: int) -> None:
        """Wait at the gate of this request, if it has one. Prefill increments (piece -1) pass."""
        await asyncio.sleep(0)
        gate = self._gates.get(rid.rpartition(".")[2])
        if gate and piece >= 0:
            self.waiting.append(rid)
            self._arrived.set()
            await gate.wait()

    async def until_waiting(self, count: int, limit_s: float = 10.0) -> None:
        """Return once `count` waits have begun."""
        async with asyncio.timeout(limit_s):
            while len(self.waiting) < count:
                self._arrived.clear()
                await self._arrived.wait()


class Hold:
    """A pace at which every request waits from piece `first` on, until released."""

    def __init__(self, first: int = -1) -> None:
        self._first = first
        self._arrived = asyncio.Event()
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let all go on, now and later."""
        self._released.set()

    async def pace(self, _rid: str, piece: int) -> None:
        """Wait until released, if the piece is one to wait at."""
        if piece >= self._first:
            self._arrived.set()
            await self._released.wait()

    async def until_waiting(self, limit_s: float = 10.0) -> None:
        """Return once a request waits."""
        async with asyncio.timeout(limit_s):
            await self._arrived.wait()
