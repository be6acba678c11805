"""A prompt's KV between the two servers: raw bytes over HTTP, described by headers.

`GET /kv/{room}` on the prefill server's bootstrap port answers when the room's prompt is computed; `DELETE` gives the
room up. Bytes cross in machine order: both servers run on one kind of machine.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import aiohttp
import torch
from torch import Tensor

from shell_router.engines.embedded.kv_layers import KvShape

HEADER = "X-KV-Parcel"


class KvTransferError(Exception):
    """A room's KV did not cross."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels beside the bytes: the prompt's size, its first output token, and its adapter's fingerprint."""

    prompt_tokens: int
    cached_tokens: int
    token_id: int
    logprob: float | None
    dtype: str
    adapter: str = ""

    def headers(self) -> dict[str, str]:
        return {HEADER: json.dumps(asdict(self))}

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> "Parcel":
        return cls(**json.loads(headers[HEADER]))


def to_bytes(kv: Tensor) -> memoryview:
    """The tensor's memory itself, without a copy where it already lies in main memory."""
    flat = kv.to("cpu").contiguous().view(torch.uint8).numpy()
    return flat.reshape(-1).data


def from_bytes(flat: Tensor, parcel: Parcel, shape: KvShape) -> Tensor:
    """The tensor over the received bytes `flat`, `[layers, 2, kv_heads, prompt_tokens, head_dim]`."""
    if parcel.dtype != str(shape.dtype):
        raise KvTransferError(f"prefill computes in {parcel.dtype}, decode in {shape.dtype}")
    wanted = (shape.layers, 2, shape.kv_heads, parcel.prompt_tokens, shape.head_dim)
    numbers = flat.view(shape.dtype)
    if numbers.numel() != torch.Size(wanted).numel():
        raise KvTransferError(f"the KV has {numbers.numel()} numbers, not those of shape {wanted}: another model?")
    return numbers.reshape(wanted)


class KvClient:
    """The decode server's side."""

    def __init__(self, session: aiohttp.ClientSession, *, wait_s: float) -> None:
        self._session = session
        self._wait_s = wait_s

    async def fetch(self, host: str, port: int, room: int) -> tuple[Parcel, Tensor]:
        """Wait for the room's KV and take its bytes. Raises `KvTransferError`."""
        try:
            async with asyncio.timeout(self._wait_s), self._session.get(_address(host, port, room)) as response:
                if response.status != 200:
                    raise KvTransferError(await response.text())
                return Parcel.from_headers(response.headers), await _receive(response)
        except TimeoutError as error:
            raise KvTransferError(f"no KV within {self._wait_s:g} s") from error
        except aiohttp.ClientError as error:
            raise KvTransferError(f"{type(error).__name__}: {error}") from error

    async def give_up(self, host: str, port: int, room: int) -> None:
        """Tell prefill that nobody will take the room's KV; a prefill server that is gone needs no telling."""
        try:
            async with asyncio.timeout(5.0), self._session.delete(_address(host, port, room)):
                pass
        except (TimeoutError, aiohttp.ClientError):
            return


async def _receive(response: aiohttp.ClientResponse) -> Tensor:
    """The body, written straight into a tensor of bytes."""
    flat = torch.empty(response.content_length or 0, dtype=torch.uint8)
    memory, at = flat.numpy().data, 0
    async for chunk in response.content.iter_any():
        memory[at : at + len(chunk)] = chunk
        at += len(chunk)
    return flat


def _address(host: str, port: int, room: int) -> str:
    bracketed = f"[{host}]" if ":" in host else host
    return f"http://{bracketed}:{port}/kv/{room}"
