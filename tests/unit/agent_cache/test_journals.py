"""Journals in a real Redis: one owner at a time, nothing written twice, and nothing for good."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from agent_cache import CacheUnavailable, JournalDiffers, JournalState, JournalTaken
from agent_cache.redis import RedisAgentPromptCache
from agent_cache.redis.connection import RedisConnection
from agent_cache.redis.journals import CLAIM, RedisJournals
from agent_cache.redis.layout import Layout
from tests.fakes.redis_server import RedisServer

RUN = ("tenant", "key")
LEASE_S = 60.0


@pytest.fixture
async def journals(server: RedisServer) -> AsyncIterator[RedisJournals]:
    async with RedisAgentPromptCache(
        server.url, clock=time.monotonic, lease_s=LEASE_S, journal_ttl_s=600
    ) as cache:
        yield cache.journals


async def expire(server: RedisServer) -> None:
    """What the lease's time does."""
    server.ask("DEL", next(name for name, _ in server.keys().items() if name.endswith(":lease")))


async def test_the_next_owner_reads_what_the_last_one_wrote(journals: RedisJournals) -> None:
    assert await journals.claim(*RUN, "a", "head") == []
    assert await journals.append(*RUN, "a", 0, [b"one", b"\xff two"])
    assert await journals.append(*RUN, "a", 2, [b"three"])
    await journals.release(*RUN, "a")
    assert await journals.claim(*RUN, "b", "head") == [b"one", b"\xff two", b"three"]


async def test_a_journal_has_one_owner_until_its_lease_ends(
    journals: RedisJournals, server: RedisServer
) -> None:
    assert await journals.claim(*RUN, "a", "head") == []
    assert await journals.claim(*RUN, "b", "head") is None
    with pytest.raises(JournalTaken):
        await journals.append(*RUN, "b", 0, [b"stranger's"])
    await journals.release(*RUN, "b")
    assert await journals.claim(*RUN, "b", "head") is None
    await expire(server)
    assert await journals.claim(*RUN, "b", "head") == []
    with pytest.raises(JournalTaken):
        await journals.append(*RUN, "a", 0, [b"late"])


async def test_another_head_is_refused_whether_the_journal_is_owned_or_not(
    journals: RedisJournals,
) -> None:
    await journals.claim(*RUN, "a", "head")
    for _ in range(2):
        with pytest.raises(JournalDiffers):
            await journals.claim(*RUN, "b", "another head")
        await journals.release(*RUN, "a")


async def test_tenants_do_not_share_keys(journals: RedisJournals) -> None:
    await journals.claim("alice", "key", "a", "head")
    assert await journals.claim("bob", "key", "b", "another head") == []


async def test_a_write_that_was_sent_before_is_not_repeated(journals: RedisJournals) -> None:
    await journals.claim(*RUN, "a", "head")
    await journals.append(*RUN, "a", 0, [b"one", b"two"])  # its reply was lost
    assert await journals.append(*RUN, "a", 0, [b"one", b"two", b"three"])
    await journals.release(*RUN, "a")
    assert await journals.claim(*RUN, "b", "head") == [b"one", b"two", b"three"]


async def test_an_owner_that_was_silent_too_long_goes_on_unless_another_came(
    journals: RedisJournals, server: RedisServer
) -> None:
    await journals.claim(*RUN, "a", "head")
    await expire(server)
    assert await journals.append(*RUN, "a", 0, [b"one"])
    assert await journals.claim(*RUN, "b", "head") is None


@pytest.mark.parametrize("left", ["released", "expired"])
async def test_an_owner_that_was_away_adds_nothing_once_another_came(
    journals: RedisJournals, server: RedisServer, left: str
) -> None:
    await journals.claim(*RUN, "a", "head")
    await expire(server)
    await journals.claim(*RUN, "b", "head")
    await journals.append(*RUN, "b", 0, [b"b's"])
    await (journals.release(*RUN, "b") if left == "released" else expire(server))
    with pytest.raises(JournalTaken):
        await journals.append(*RUN, "a", 0, [b"a's", b"too"])
    assert await journals.claim(*RUN, "c", "head") == [b"b's"]


async def test_a_claim_whose_reply_was_lost_can_be_sent_again(journals: RedisJournals) -> None:
    await journals.claim(*RUN, "a", "head")
    assert await journals.claim(*RUN, "a", "head") == []


async def test_a_journal_that_redis_has_lost_is_reported(
    journals: RedisJournals, server: RedisServer
) -> None:
    await journals.claim(*RUN, "a", "head")
    await journals.append(*RUN, "a", 0, [b"one"])
    server.ask("FLUSHALL")
    assert not await journals.append(*RUN, "a", 1, [b"two"])
    assert server.keys() == {}


async def test_lease_and_journal_expire(journals: RedisJournals, server: RedisServer) -> None:
    await journals.claim(*RUN, "a", "head")
    await journals.append(*RUN, "a", 0, [b"one"])
    lives_ms = {name.rpartition(":")[2]: left for name, left in server.keys().items()}
    assert 0 < lives_ms["lease"] <= 60_000
    assert all(60_000 < lives_ms[name] <= 600_000 for name in ("journal", "owner"))


async def test_a_redis_that_is_away_is_reported_as_that(
    journals: RedisJournals, server: RedisServer
) -> None:
    await journals.claim(*RUN, "a", "head")
    server.kill()
    with pytest.raises(CacheUnavailable):
        await journals.append(*RUN, "a", 0, [b"one"])


async def test_a_journal_can_be_looked_at_without_its_lease(journals: RedisJournals) -> None:
    assert await journals.look(*RUN) is None
    await journals.claim(*RUN, "a", "head")
    assert await journals.look(*RUN) == JournalState(b"head", b"", b"", is_leased=True)
    await journals.append(*RUN, "a", 0, [b"one", b"two", b"three"])
    await journals.release(*RUN, "a")
    assert await journals.look(*RUN) == JournalState(b"head", b"one", b"three", is_leased=False)
    assert await journals.look("another", RUN[1]) is None


async def test_a_sealed_journal_takes_nothing_from_its_owner(journals: RedisJournals) -> None:
    await journals.seal(*RUN, b"of nothing", b"")
    assert await journals.look(*RUN) is None
    await journals.claim(*RUN, "a", "head")
    await journals.seal(*RUN, b"last", b"end")
    assert not await journals.append(*RUN, "a", 0, [b"late"])
    assert await journals.look(*RUN) == JournalState(b"head", b"last", b"last", is_leased=False)
    assert await journals.claim(*RUN, "b", "head") == [b"last"]


async def test_a_journal_that_has_ended_is_not_sealed(journals: RedisJournals) -> None:
    await journals.claim(*RUN, "a", "head")
    await journals.append(*RUN, "a", 0, [b"end: well"])
    await journals.seal(*RUN, b"end: cancelled", b"end")
    assert await journals.look(*RUN) == JournalState(
        b"head", b"end: well", b"end: well", is_leased=True
    )


class Silent(Redis):
    """A client whose claims arrive, and get no reply."""

    claimed: asyncio.Event

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        reply = await super().execute_command(*args, **options)
        if CLAIM in args:
            self.claimed.set()
            await asyncio.Event().wait()
        return reply


async def test_a_claim_that_is_cancelled_before_its_reply_leaves_no_lease(
    journals: RedisJournals, server: RedisServer
) -> None:
    async with Silent.from_url(server.url) as client:
        client.claimed = asyncio.Event()
        layout = Layout("agent-prompt-cache", "owner", ttl_s=600)
        silent = RedisJournals(
            RedisConnection(client, reply_limit_s=60), layout, ttl_s=600, lease_s=LEASE_S
        )
        claim = asyncio.create_task(silent.claim(*RUN, "a", "head"))
        await client.claimed.wait()
        assert await journals.claim(*RUN, "b", "head") is None
        claim.cancel()
        await asyncio.wait([claim])
        assert claim.cancelled()
    assert await journals.claim(*RUN, "b", "head") == []
