"""Waiting for engines to be rid of their requests, as they say themselves by `/v1/loads`.

They are other processes: there is nothing to wait on but their answers. SGLang counts a request nowhere for one step
of its scheduler, between its transfer and its first decode; it reads its mail once a step, so two answers of zero in
a row are needed, and enough.
"""

import asyncio
from time import monotonic

import aiohttp


async def idle(session: aiohttp.ClientSession, *urls: str, limit_s: float) -> float:
    """When (monotonic seconds) these servers were first seen without requests; TimeoutError if they never are."""
    async with asyncio.timeout(limit_s):
        while True:
            if await held(session, *urls):
                continue
            seen_s = monotonic()
            if not await held(session, *urls):
                return seen_s


async def held(session: aiohttp.ClientSession, *urls: str) -> int:
    """Requests that run or wait on these servers."""
    return sum(await asyncio.gather(*(_held_by(session, url) for url in urls)))


async def _held_by(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/v1/loads") as answer:
        ranks = (await answer.json())["loads"]
    return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks)
