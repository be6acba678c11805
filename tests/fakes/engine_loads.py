"""Waiting for engines to be rid of their requests, as they say themselves by `/v1/loads`.

They are other processes: there is nothing to wait on but their answers. SGLang counts a request nowhere from its
transfer until it next tells its load, up to 15 steps later; its tokens are counted all the time, so both are looked at.
It reads its mail once a step, so two answers of nothing in a row are needed, and enough.
"""

import asyncio
from dataclasses import dataclass
from time import monotonic

import aiohttp


@dataclass(frozen=True, slots=True)
class Slots:
    """What requests take on some servers: how many they are, in whatever queue, and the KV tokens that are theirs."""

    requests: int
    tokens: int


async def idle(session: aiohttp.ClientSession, *urls: str, limit_s: float, but_kv: bool = False) -> float:
    """When (monotonic seconds) these servers were first seen without requests; TimeoutError if they never are.

    With `but_kv` they may still hold KV of requests that have ended.
    """
    async with asyncio.timeout(limit_s):
        while True:
            if await _taken(session, urls, but_kv):
                continue
            seen_s = monotonic()
            if not await _taken(session, urls, but_kv):
                return seen_s


async def _taken(session: aiohttp.ClientSession, urls: tuple[str, ...], but_kv: bool) -> bool:
    found = await slots(session, *urls)
    return found.requests > 0 or (found.tokens > 0 and not but_kv)


async def held(session: aiohttp.ClientSession, *urls: str) -> int:
    """Requests on these servers."""
    return (await slots(session, *urls)).requests


async def slots(session: aiohttp.ClientSession, *urls: str) -> Slots:
    """What is taken on these servers together."""
    found = await asyncio.gather(*(_slots_of(session, url) for url in urls))
    return Slots(sum(one.requests for one in found), sum(one.tokens for one in found))


async def _slots_of(session: aiohttp.ClientSession, url: str) -> Slots:
    """Waiting requests are also those in decode's queues before and during the transfer, and before the bootstrap."""
    async with session.get(f"{url}/v1/loads") as answer:
        ranks = (await answer.json())["loads"]
    handed_over = sum(rank["disaggregation"]["prefill_inflight_queue_reqs"] for rank in ranks)
    requests = sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks)
    return Slots(requests + handed_over, sum(rank["num_used_tokens"] for rank in ranks))
