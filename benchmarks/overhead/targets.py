"""What the load may be sent to: a router, or the pair itself as the baseline."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import orjson

from overhead.load_client import Connection, connect

Arrived = Callable[[bytes], None]
BOOTSTRAP_PORT = 8998


class Poster(Protocol):
    """One request at a time."""

    async def post(self, body: bytes, arrived: Arrived | None = None) -> bytes:
        """The answer to a native body, as it came; `arrived` gets each piece when it comes."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class Target(Protocol):
    """Something that answers /generate."""

    async def open(self) -> Poster:
        """A fresh connection to it."""
        ...


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """A router at `url`."""

    url: str
    quick_acks: bool = False

    async def open(self) -> "RouterPoster":
        """A fresh connection to it."""
        return RouterPoster(await connect(self.url, quick_acks=self.quick_acks))


class RouterPoster:
    """Posts to /generate of a router."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def post(self, body: bytes, arrived: Arrived | None = None) -> bytes:
        """The router's answer."""
        return await self._connection.post("/generate", body, arrived)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class DirectTarget:
    """The pair itself: the load client sends both legs, as a router would."""

    prefill_url: str
    decode_url: str
    bootstrap_port: int = BOOTSTRAP_PORT

    async def open(self) -> "DirectPoster":
        """A fresh connection to each server."""
        prefill, decode = await asyncio.gather(connect(self.prefill_url), connect(self.decode_url))
        return DirectPoster(prefill, decode, self.bootstrap_port)


class DirectPoster:
    """Posts to both servers of a pair and answers with decode's answer."""

    def __init__(self, prefill: Connection, decode: Connection, bootstrap_port: int) -> None:
        self._prefill = prefill
        self._decode = decode
        self._bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port}

    async def post(self, body: bytes, arrived: Arrived | None = None) -> bytes:
        """Decode's answer, once prefill's is there too."""
        fields = {**self._bootstrap, "bootstrap_room": random.getrandbits(62)}
        sent = body[:-1] + b"," + orjson.dumps(fields)[1:]
        prefill = asyncio.ensure_future(self._prefill.post("/generate", sent))
        answer = await self._decode.post("/generate", sent, arrived)
        await prefill
        return answer

    def close(self) -> None:
        """Close the connections."""
        self._prefill.close()
        self._decode.close()
