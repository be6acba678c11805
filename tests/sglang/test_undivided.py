"""An undivided server of real SGLang ends in mid-stream, and serves again once it is back.

What it shares with a pair is in the other tests, which run on both.
"""

import asyncio
from contextlib import aclosing

import pytest

from launch.sglang_cpu.engine import EngineServer
from launch.sglang_cpu.pair import until_ready
from shell_router.core.engine import Finish, Generation
from shell_router.engines.address import ServerAddress
from shell_router.engines.sglang import SglangPair
from shell_router.errors import EngineUnreachable

pytestmark = pytest.mark.sglang


def request(rid: str, new_tokens: int) -> Generation:
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return Generation(rid, list(range(20, 80)), sampling)


async def test_a_server_that_is_killed_in_mid_stream_is_one_error_and_serves_again(
    own_server: EngineServer,
) -> None:
    async with aclosing(SglangPair(ServerAddress(own_server.url))) as client:
        async with aclosing(client.generate(request("killed", 20_000))) as stream:
            await anext(stream)
            own_server.kill()
            with pytest.raises(EngineUnreachable, match=r"^The engine "):
                async for _ in stream:
                    pass
        assert not await client.fleet.serves()
        own_server.start()
        await asyncio.to_thread(until_ready, own_server)
        assert await client.fleet.serves()
        events = [event async for event in client.generate(request("next", 6))]
        assert isinstance(events[-1], Finish) and events[-1].completion_tokens == 6
