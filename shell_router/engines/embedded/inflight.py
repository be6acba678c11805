"""Requests that a server is working on, by id, and how they are aborted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shell_router.engines.embedded.adapted_linears import Adapter
from shell_router.engines.embedded.mailbox import Mailbox
from shell_router.engines.embedded.output import Piece, abort_reason
from shell_router.engines.embedded.wire import GenerateRequest
from shell_router.errors import InvalidRequest


@dataclass(slots=True, eq=False)
class Inflight:
    """One request in work: its output comes through `mailbox`. `cached_tokens` is set before the first piece."""

    request: GenerateRequest
    adapter: Adapter | None = None
    mailbox: Mailbox = field(init=False)
    cached_tokens: int = 0
    transferring: bool = False

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(self.request.heard_every)

    def abort(self) -> None:
        """Make an abort the output's end. Whoever reads it then stops the work."""
        if self.transferring:
            self.fail("KV transfer failed with exception KVTransferError: Aborted by AbortReq.")
        else:
            self.mailbox.put(Piece(finish_reason=abort_reason()))

    def fail(self, message: str) -> None:
        """Make a failure of the server's the output's end."""
        self.mailbox.put(Piece(finish_reason=abort_reason(message, 500)))


class InflightRequests:
    """The requests in work, by `rid`. One event loop only."""

    def __init__(self) -> None:
        self._by_rid: dict[str, Inflight] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    @contextmanager
    def add(self, request: GenerateRequest, adapter: Adapter | None = None) -> Iterator[Inflight]:
        """Register a request for the length of the block, with its adapter. Raises `InvalidRequest` on an id in use."""
        if request.rid in self._by_rid:
            raise InvalidRequest(
                f"Duplicate request ID detected: {request.rid}", remedy="Use a new id for every attempt."
            )
        inflight = Inflight(request, adapter)
        self._by_rid[request.rid] = inflight
        try:
            yield inflight
        finally:
            del self._by_rid[request.rid]

    def abort(self, rid: str) -> None:
        """Abort one request; an unknown one has ended already."""
        if rid in self._by_rid:
            self._by_rid[rid].abort()

    def abort_all(self) -> None:
        for inflight in self._by_rid.values():
            inflight.abort()

    @property
    def transferring(self) -> int:
        """Requests whose KV is on its way."""
        return sum(each.transferring for each in self._by_rid.values())
