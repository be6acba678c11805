"""What a running pair shows of its processes."""

import asyncio

from shell_router.engines.embedded.running import EmbeddedPair, EmbeddedServer
from shell_router.engines.embedded.settings import EmbeddedSettings


async def test_a_pair_shows_the_latest_processes_and_a_wait_tells_of_one_that_is_replaced_already() -> None:
    prefill, decode = EmbeddedServer("127.0.0.1", 1, 30000, 8998), EmbeddedServer("127.0.0.1", 2, 30001, 0)
    servers = {"a/prefill": prefill, "a/decode": decode}
    pair = EmbeddedPair("a", EmbeddedSettings("models/small"), servers)
    waiting = asyncio.create_task(pair.wait_dead())
    await asyncio.sleep(0)
    prefill.dead.set()
    assert not pair.alive
    servers["a/prefill"] = EmbeddedServer("127.0.0.1", 3, 30000, 8998)
    assert await waiting is prefill
    assert (pair.alive, pair.prefill.pid, pair.decode.pid) == (True, 3, 2)
