import pytest

from tests.fakes.redis_server import own_redis

server = pytest.fixture(own_redis)
