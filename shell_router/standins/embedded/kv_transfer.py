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
    """The KV of a room was not handed over."""


@dataclass(frozen=True, slots=True)
class PrefilledKv:
    """A computed prompt: its KV and the first output token.

    Attributes:
        kv: `[layers, 2, kv_heads, tokens, head_dim]`.
        input_logprobs: Log-probabilities of the prompt's tokens, from where they were asked for;
            None for the prompt's first token. They do not travel.
    """

    kv: Tensor
    cached_tokens: int
    token_id: int
    logprob: float | None
    input_logprobs: tuple[float | None, ...] = ()

    def response(self) -> web.Response:
        """Return the KV with headers that describe it; memory on the host is not copied."""
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
        """Return the prompt whose KV came as the bytes `flat`.

        Raises `KvTransferError` if another model computed it.
        """
        about = json.loads(headers[HEADER])
        sent_shape = about.pop("shape")
        dtype = about.pop("dtype")
        if dtype != str(shape.dtype):
            raise KvTransferError(f"prefill computes in {dtype}, decode in {shape.dtype}")
        expected = [shape.layers, 2, shape.kv_heads, sent_shape[3], shape.head_dim]
        if sent_shape != expected:
            raise KvTransferError(f"the KV has shape {sent_shape}, not {expected}: another model?")
        return cls(flat.view(shape.dtype).reshape(expected), **about)


class KvClient:
    """The decode server's client of bootstrap rooms.

    A room's address is its prefill server's host and bootstrap port, and its number.
    """

    def __init__(self, session: aiohttp.ClientSession, shape: KvShape, *, wait_s: float) -> None:
        self._session = session
        self._shape = shape
        self._wait_s = wait_s

    async def fetch(self, host: str, port: int, room: int) -> PrefilledKv:
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
                return PrefilledKv.read(response.headers, flat, self._shape)
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
    """One hand-over of KV. Either side may come first; the limit begins again with the KV.

    A room that failed is remembered for the limit, so a partner that comes late learns of it at
    once.
    """

    def __init__(self, room_id: int, wait_s: float, forget: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._room_id = room_id
        self._wait_s = wait_s
        self._forget = forget
        self.claimed = False
        self.offered: asyncio.Future[PrefilledKv] = self._loop.create_future()
        self.taken: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._arm()

    def offer(self, prefilled: PrefilledKv) -> None:
        """Put the KV here until it is taken, given up or late."""
        if not self.offered.done():
            self._timer.cancel()
            self._timer = self._arm()
            self.offered.set_result(prefilled)

    def complete(self) -> None:
        """End the room: the KV was taken."""
        if not self.taken.done():
            self._timer.cancel()
            self._forget(self._room_id)
            self.taken.set_result(None)

    def fail(self, reason: str) -> None:
        """End the room, unless it has ended: the KV will not be taken, and both sides learn why."""
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
    """The open bootstrap rooms of a prefill server. One event loop only."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._rooms: dict[int, BootstrapRoom] = {}

    def open(self, room_id: int) -> BootstrapRoom:
        """Return the room of that number; make it if it is new."""
        if room_id not in self._rooms:
            self._rooms[room_id] = BootstrapRoom(room_id, self._wait_s, self._forget)
        return self._rooms[room_id]

    @property
    def awaiting_decode(self) -> int:
        """The number of rooms whose KV is there and not yet taken."""
        return sum(room.offered.done() and not room.taken.done() for room in self._rooms.values())

    def close_all(self) -> None:
        """Fail all rooms: the server stops."""
        for room in list(self._rooms.values()):
            room.fail("the prefill server is stopping")

    def _forget(self, room_id: int) -> None:
        self._rooms.pop(room_id, None)

    def application(self) -> web.Application:
        """Return the bootstrap port's routes."""
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
