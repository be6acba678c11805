"""What a deployment's file says of Redis reaches it: password, TLS with certificates on both sides,
prefix of keys.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from agent_cache import LogKey
from shell_router.app.services import open_cache
from shell_router.config import read_config
from shell_router.errors import ConfigError
from tests.fakes.certificates import authority
from tests.fakes.redis_server import RedisServer, own_redis

server = pytest.fixture(own_redis)


@asynccontextmanager
async def tls_before(server: RedisServer, folder: Path) -> AsyncIterator[int]:
    """A port where only clients with a certificate reach `server`: not every build of it speaks
    TLS.
    """

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(2**16):
            writer.write(piece)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        await asyncio.gather(copy(reader, far), copy(near, writer), return_exceptions=True)

    signing = authority(folder)
    signing.signed("router")
    context = signing.asking(signing.signed("redis"))
    async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as listening:
        yield listening.sockets[0].getsockname()[1]


def written(folder: Path, cache: str) -> Path:
    file = folder / "router.yaml"
    file.write_text(f"models: {{small: {{path: m}}}}\ncache: {{backend: redis, {cache}}}\n")
    return file


async def test_password_tls_and_prefix_of_the_file_reach_redis(
    server: RedisServer, tmp_path: Path
) -> None:
    async with tls_before(server, tmp_path) as port:
        tls = "tls: {ca: authority.pem, certificate: router.pem, key: router.key}"
        cache_settings = (
            f"url: 'rediss://127.0.0.1:{port}/0', password: {{env: "
            f"REDIS_PASSWORD}}, prefix: mine, {tls}"
        )
        settings = read_config(written(tmp_path, cache_settings), {}).cache
        assert "geheim" not in repr(settings)
        async with open_cache(settings, time.monotonic, {"REDIS_PASSWORD": "geheim"}) as cache:
            assert not await cache.healthy(), "Redis wants no password yet"
            server.ask("CONFIG", "SET", "requirepass", "geheim")
            assert await cache.healthy()
            await cache.logs.create(LogKey("tenant", "program", "agent"))
            assert not cache.stats.degraded
            with redis.Redis.from_url(server.url, password="geheim", protocol=2) as client:
                assert {name.partition(b":")[0] for name in client.scan_iter()} == {b"mine"}
                client.set("mine:{tenant:bad}:log:agent", "no log")
                await cache.logs.create(LogKey("tenant", "bad", "agent"))
            assert cache.stats.withdrawn == 1, "metrics count it"


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("url: 'redis://:x@h', password: y", "both url and password"),
        ("url: 'redis://[h'", "url is no URL"),
        ("tls: {ca: a.pem}", "rediss://"),
        ("url: 'rediss://h', tls: {certificate: a.pem}", "go together"),
        ("prefix: 'a b'", "prefix"),
    ],
)
def test_what_cannot_go_together_is_refused(tmp_path: Path, cache: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(written(tmp_path, cache), {})


def test_a_user_in_the_url_goes_with_a_password_beside_it(tmp_path: Path) -> None:
    settings = read_config(
        written(tmp_path, "url: 'redis://router@h', password: {env: REDIS_PASSWORD}"), {}
    ).cache
    assert settings.url == "redis://router@h"


async def test_an_empty_password_is_refused(tmp_path: Path) -> None:
    settings = read_config(written(tmp_path, "password: {env: NO_SUCH_VARIABLE}"), {}).cache
    with pytest.raises(ConfigError, match="Set the environment variable NO_SUCH_VARIABLE"):
        async with open_cache(settings, time.monotonic):
            pass
