"""Bootstrap rooms on the prefill server: where a computed prompt waits for its decode partner."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from shell_router.engines.embedded.kv_transfer import KvTransferError, Parcel, to_bytes
from shell_router.engines.embedded.prefill_worker import Prefilled


class Room:
    """One hand-over. Either side may come first; the limit counts anew when the KV is there.

    A room that failed is remembered for the limit, so that a partner who comes late learns of it at once.
    """

    def __init__(self, room_id: int, wait_s: float, forget: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._room_id = room_id
        self._wait_s = wait_s
        self._forget = forget
        self.claimed = False
        self.offered: asyncio.Future[Prefilled] = self._loop.create_future()
        self.taken: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._arm()

    def offer(self, prefilled: Prefilled) -> None:
        """Put the KV here; it is let go when taken, given up or late."""
        if not self.offered.done():
            self._timer.cancel()
            self._timer = self._arm()
            self.offered.set_result(prefilled)

    def complete(self) -> None:
        """The KV was taken."""
        if not self.taken.done():
            self._timer.cancel()
            self._forget(self._room_id)
            self.taken.set_result(None)

    def fail(self, reason: str) -> None:
        """The KV will not be taken; both sides learn why. After the end of the room this changes nothing."""
        if self.taken.done():
            return
        self._timer.cancel()
        self._loop.call_later(self._wait_s, self._forget, self._room_id)
        if self.offered.done():
            self.offered = self._loop.create_future()  # lets go of the KV
        for future in (self.offered, self.taken):
            future.set_exception(KvTransferError(f"KVTransferError(bootstrap_room={self._room_id}): {reason}"))
            future.exception()  # seen: nobody need be waiting

    def _arm(self) -> asyncio.TimerHandle:
        return self._loop.call_later(self._wait_s, self.fail, f"not handed over within {self._wait_s:g} s")


class Rooms:
    """All open rooms of a prefill server. One event loop only."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._rooms: dict[int, Room] = {}

    def open(self, room_id: int) -> Room:
        """The room of that number, made when first asked for."""
        if room_id not in self._rooms:
            self._rooms[room_id] = Room(room_id, self._wait_s, self._forget)
        return self._rooms[room_id]

    @property
    def awaiting_decode(self) -> int:
        """Rooms whose KV is there and not yet taken."""
        return sum(room.offered.done() and not room.taken.done() for room in self._rooms.values())

    def close_all(self) -> None:
        for room in list(self._rooms.values()):
            room.fail("the prefill server is stopping")

    def _forget(self, room_id: int) -> None:
        self._rooms.pop(room_id, None)

    def application(self) -> web.Application:
        """The bootstrap port's routes."""
        app = web.Application()
        app.router.add_get("/kv/{room:\\d+}", self._get)
        app.router.add_delete("/kv/{room:\\d+}", self._delete)
        return app

    async def _get(self, request: web.Request) -> web.Response:
        room = self.open(int(request.match_info["room"]))
        try:
            prefilled = await asyncio.shield(room.offered)
        except KvTransferError as error:
            return web.Response(status=410, text=str(error))
        except asyncio.CancelledError:
            room.fail("the decode server went away")
            raise
        response = web.Response(
            body=to_bytes(prefilled.kv), headers=_parcel(prefilled).headers(), content_type="application/octet-stream"
        )
        try:
            await response.prepare(request)
            await response.write_eof()
        except ConnectionResetError:
            room.fail("the decode server went away")
        else:
            room.complete()
        return response

    async def _delete(self, request: web.Request) -> web.Response:
        self.open(int(request.match_info["room"])).fail("the decode server gave the room up")
        return web.Response()


def _parcel(prefilled: Prefilled) -> Parcel:
    return Parcel(
        prompt_tokens=prefilled.kv.shape[3],
        cached_tokens=prefilled.cached_tokens,
        token_id=prefilled.token_id,
        logprob=prefilled.logprob,
        dtype=str(prefilled.kv.dtype),
        adapter=prefilled.adapter,
    )
