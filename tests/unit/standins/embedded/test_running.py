"""What a running pair shows of its processes."""

from shell_router.standins.embedded.fleet import EmbeddedPair
from shell_router.standins.embedded.servers import EmbeddedServer, Spawner
from shell_router.standins.embedded.settings import EmbeddedSettings, ServerSettings

SETTINGS = EmbeddedSettings("models/small")


def server(pid: int) -> EmbeddedServer:
    made = EmbeddedServer("a", 0, ServerSettings(SETTINGS, "prefill"), Spawner())
    made.serve(pid, 30000, 8998)
    return made


async def test_a_pair_shows_the_latest_processes() -> None:
    prefill, decode = server(1), server(2)
    servers = {"a/prefill": prefill, "a/decode": decode}
    pair = EmbeddedPair("a", SETTINGS, servers)
    prefill.dead.set()
    assert not pair.alive
    servers["a/prefill"] = server(3)
    assert (pair.alive, pair.prefill.pid, pair.decode.pid) == (True, 3, 2)
