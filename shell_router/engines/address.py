"""Where a prefill-decode pair is, and how long to wait for it."""

from dataclasses import dataclass

from yarl import URL


@dataclass(frozen=True, slots=True)
class PairLimits:
    """How long to wait for an engine, in seconds.

    `stall_s`: without a byte from a server that works on a request, waiting in its queue included.
    `answer_s`: the same for relayed requests that are not streamed, which come as one piece.
    `connect_s`: for a connection. `abort_s`: for an abort to be accepted. `settle_s`: for the
    prefill leg's answer once decode has ended.
    """

    stall_s: float = 60.0
    answer_s: float = 600.0
    connect_s: float = 5.0
    abort_s: float = 5.0
    settle_s: float = 1.0


DEFAULT_LIMITS = PairLimits()


@dataclass(frozen=True, slots=True)
class Server:
    """One of a pair's two servers: what to call it in errors, and where it is."""

    role: str
    url: URL

    def __str__(self) -> str:
        return f"{self.role} engine {self.url}"


@dataclass(frozen=True, slots=True)
class PairAddress:
    """Where a pair is. The bootstrap host and port are the prefill server's, as decode reaches
    it."""

    prefill_url: str
    decode_url: str
    bootstrap_host: str
    bootstrap_port: int

    @property
    def prefill(self) -> Server:
        """The prefill server."""
        return Server("prefill", URL(self.prefill_url))

    @property
    def decode(self) -> Server:
        """The decode server."""
        return Server("decode", URL(self.decode_url))
