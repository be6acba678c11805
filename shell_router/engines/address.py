"""Addresses of engine servers, and the limits of waiting for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from yarl import URL


@dataclass(frozen=True, slots=True)
class PairLimits:
    """Limits of waiting for an engine, in seconds.

    Attributes:
        stall_s: Without a byte from a server that works on a request, its queue included.
        answer_s: The same for relayed requests that are not streamed, whose answer comes whole.
        connect_s: For a connection.
        abort_s: For an abort to be accepted.
        settle_s: For the prefill leg's answer once decode has ended.
    """

    stall_s: float = 60.0
    answer_s: float = 600.0
    connect_s: float = 5.0
    abort_s: float = 5.0
    settle_s: float = 1.0


DEFAULT_LIMITS = PairLimits()
UNDIVIDED = "server"


@dataclass(frozen=True, slots=True)
class Server:
    """The role and the URL of an engine server.

    The role `server` is that of an undivided server, which prefills and decodes.
    """

    role: str
    url: URL

    @property
    def name(self) -> str:
        """The name in errors, which clients read."""
        if self.role == UNDIVIDED:
            return "engine"
        return f"{self.role} engine"

    @property
    def mode(self) -> str:
        """SGLang's name of the role: its `--disaggregation-mode`."""
        if self.role == UNDIVIDED:
            return "null"
        return self.role

    @property
    def public_url(self) -> str:
        """The URL for logs, metrics and answers: without a user and a password."""
        return str(self.url.with_user(None))

    def __str__(self) -> str:
        return f"{self.name} {self.public_url}"


class Address(Protocol):
    """The address of servers that are added and drained together."""

    @property
    def servers(self) -> tuple[Server, ...]:
        """A server of each role."""


@dataclass(frozen=True, slots=True)
class PairAddress:
    """The address of a pair.

    The bootstrap host and port are the prefill server's, as the decode server reaches it.
    """

    prefill_url: str
    decode_url: str
    bootstrap_host: str
    bootstrap_port: int

    @property
    def servers(self) -> tuple[Server, ...]:
        """The prefill server, then the decode server."""
        return Server("prefill", URL(self.prefill_url)), Server("decode", URL(self.decode_url))

    @property
    def bootstrap(self) -> Mapping[str, str | int]:
        """The fields of a body by which decode finds prefill, without a room."""
        return {"bootstrap_host": self.bootstrap_host, "bootstrap_port": self.bootstrap_port}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of an undivided server."""

    url: str
    bootstrap: ClassVar[Mapping[str, str | int]] = {}

    @property
    def servers(self) -> tuple[Server, ...]:
        """The server alone."""
        return (Server(UNDIVIDED, URL(self.url)),)
