"""Requests of a running router, as `shell-router trace` lists and draws them."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp

from shell_router.lab.evaluation.client import Client

Trace = Mapping[str, Any]
LIMIT_S = 30.0


async def fetch_trace(url: str, api_key: str | None, trace_id: str) -> Trace:
    """One request's trace. Raises ShellRouterError."""
    async with aiohttp.ClientSession() as session:
        return await Client(session, url, api_key=api_key, limit_s=LIMIT_S).trace(trace_id)


async def list_rows(url: str, api_key: str | None, filters: Mapping[str, str]) -> list[Mapping[str, str]]:
    """The latest requests, the last first, as rows of a table. Raises ShellRouterError."""
    async with aiohttp.ClientSession() as session:
        listed = await Client(session, url, api_key=api_key, limit_s=LIMIT_S).traces(filters)
    return [
        {
            "id": one["id"],
            "model": one["model"],
            "began (UTC)": f"{datetime.fromtimestamp(one['created'], UTC):%Y-%m-%d %H:%M:%S}",
            "status": one["status"],
            "ms": "" if one["duration_ms"] is None else f"{one['duration_ms']:,.0f}",
            "agents": str(one["agents"]),
        }
        for one in listed
    ]
