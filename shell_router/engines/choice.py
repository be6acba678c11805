"""Which of several servers takes a request."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from shell_router.engines.server_client import ServerClient
from shell_router.errors import EngineUnavailable

KEPT_HOMES = 65_536
"""Prompts whose server is remembered; one that is still being filled has been used a moment ago."""


class ServerChoice:
    """The servers of one role of a model; each serves every request, but not equally fast.

    A server's breaker and requests under way decide; between equals, the one that was chosen longest ago.
    """

    def __init__(self, servers: Sequence[ServerClient], clock: Callable[[], float]) -> None:
        self.servers = tuple(servers)
        self._in_turn = list(servers)
        self._clock = clock
        self._homes: OrderedDict[int, ServerClient] = OrderedDict()

    def best(self, affinity: str | None = None, avoid: Collection[ServerClient] = ()) -> ServerClient:
        """The server to send to, not one of `avoid` if another serves; requests of one `affinity` keep theirs.

        Raises EngineUnavailable while the breakers of all are open. Nothing changes until `take`.
        """
        now_s = self._clock()
        serving = [server for server in self._in_turn if not server.breaker.wait_s(now_s)]
        if not serving:
            raise self._unavailable(now_s)
        wanted = [server for server in serving if server not in avoid] or serving
        home = self._homes.get(hash(affinity)) if affinity is not None else None
        return home if home in wanted else min(wanted, key=lambda server: server.running)

    def take(self, server: ServerClient, affinity: str | None = None) -> None:
        """A request is sent to `server` now."""
        server.breaker.tried(self._clock())
        if len(self.servers) == 1:
            return
        self._in_turn.remove(server)
        self._in_turn.append(server)
        if affinity is not None:
            self._homes[hash(affinity)] = server  # a client's own key may be long
            self._homes.move_to_end(hash(affinity))
            if len(self._homes) > KEPT_HOMES:
                self._homes.popitem(last=False)

    def _unavailable(self, now_s: float) -> EngineUnavailable:
        wait_s = min(server.breaker.wait_s(now_s) for server in self.servers)
        named = " and the ".join(map(str, self.servers))
        return EngineUnavailable(
            f"The {named} failed again and again; no request is sent there for another {wait_s:.1f} s.",
            remedy="Look at the engine's log, and ask again later.",
        )
