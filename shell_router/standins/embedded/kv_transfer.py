"""A prompt's KV between the two servers: raw bytes over HTTP, described by headers.

`GET /kv/{room}` on the prefill server's bootstrap port answers when the room's prompt is computed;
`DELETE` gives the room up. Bytes cross in machine order: both servers run on one kind of machine.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import aiohttp
import torch
from aiohttp import web
from torch import Tensor

from shell_router.standins.embedded.model import KvShape

HEADER = "X-KV-Parcel"


class KvTransferError(Exception):
    """A room's KV did not cross."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A computed prompt: its KV `[layers, 2, kv_heads, tokens, head_dim]` and the first output
    token.

    `input_logprobs` are those of the prompt's tokens from where they were asked for; the first of
    them has none, and they do not travel.
    """

    kv: Tensor
    cached_tokens: int
    token_id: int
    logprob: float | None
    input_logprobs: tuple[float | None, ...] = ()

    def response(self) -> web.Response:
        """The KV's memory itself, without a copy where it already lies in main memory, with what
        describes it.
        """
        about = {
            "shape": list(self.kv.shape),
            "dtype": str(self.kv.dtype),
            "cached_tokens": self.cached_tokens,
        }
        first = {"token_id": self.token_id, "logprob": self.logprob}
        body = self.kv.to("cpu").contiguous().view(torch.uint8).numpy().reshape(-1).data
        headers = {HEADER: json.dumps({**about, **first})}
        return web.Response(body=body, headers=headers, content_type="application/octet-stream")

    @classmethod
    def read(cls, headers: Mapping[str, str], flat: Tensor, shape: KvShape) -> Self:
        """The prompt whose KV came as the bytes `flat`. Raises `KvTransferError` where another
        model computed it.
        """
        about = json.loads(headers[HEADER])
        found = about.pop("shape")
        dtype = about.pop("dtype")
        if dtype != str(shape.dtype):
            raise KvTransferError(f"prefill computes in {dtype}, decode in {shape.dtype}")
        wanted = [shape.layers, 2, shape.kv_heads, found[3], shape.head_dim]
        if found != wanted:
            raise KvTransferError(f"the KV has shape {found}, not {wanted}: another model?")
        return cls(flat.view(shape.dtype).reshape(wanted), **about)


class KvClient:
    """The decode server's side. A room's address is its prefill server's host and bootstrap port,
    and its number.
    """

    def __init__(self, session: aiohttp.ClientSession, shape: KvShape, *, wait_s: float) -> None:
        self._session = session
        self._shape = shape
        self._wait_s = wait_s

    async def fetch(self, host: str, port: int, room: int) -> Prefilled:
        """Wait for the room's KV and take it. Raises `KvTransferError`."""
        try:
            async with (
                asyncio.timeout(self._wait_s),
                self._session.get(_address(host, port, room)) as response,
            ):
                if response.status != 200:
                    raise KvTransferError(await response.text())
                # straight into a tensor: KV is large
                flat = torch.empty(response.content_length or 0, dtype=torch.uint8)
                memory = flat.numpy().data
                at = 0
                async for chunk in response.content.iter_any():
                    memory[at : at + len(chunk)] = chunk
                    at += len(chunk)
                return Prefilled.read(response.headers, flat, self._shape)
        except TimeoutError as error:
            raise KvTransferError(f"no KV within {self._wait_s:g} s") from error
        except aiohttp.ClientError as error:
            raise KvTransferError(f"{type(error).__name__}: {error}") from error

    async def give_up(self, host: str, port: int, room: int) -> None:
        """Tell prefill that the room's KV will not be taken, if prefill is still there."""
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(5.0), self._session.delete(_address(host, port, room)):
                pass


def _address(host: str, port: int, room: int) -> str:
    bracketed = f"[{host}]" if ":" in host else host
    return f"http://{bracketed}:{port}/kv/{room}"


class BootstrapRoom:
    """One hand-over. Either side may come first; the limit counts anew when the KV is there.

    A room that failed is remembered for the limit, so that a partner who comes late learns of it at
    once.
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
        """The KV will not be taken; both sides learn why. After the end of the room this changes
        nothing.
        """
        if self.taken.done():
            return
        self._timer.cancel()
        self._loop.call_later(self._wait_s, self._forget, self._room_id)
        if self.offered.done():
            self.offered = self._loop.create_future()  # lets go of the KV
        for future in (self.offered, self.taken):
            future.set_exception(
                KvTransferError(f"KVTransferError(bootstrap_room={self._room_id}): {reason}")
            )
            future.exception()  # seen: there may be no waiter

    def _arm(self) -> asyncio.TimerHandle:
        return self._loop.call_later(
            self._wait_s, self.fail, f"not handed over within {self._wait_s:g} s"
        )


class BootstrapRooms:
    """All open bootstrap rooms of a prefill server. One event loop only."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._rooms: dict[int, BootstrapRoom] = {}

    def open(self, room_id: int) -> BootstrapRoom:
        """The room of that number, made when first asked for."""
        if room_id not in self._rooms:
            self._rooms[room_id] = BootstrapRoom(room_id, self._wait_s, self._forget)
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
        response = prefilled.response()
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
