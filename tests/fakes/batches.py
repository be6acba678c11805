"""A router with a folder for batches, and the official client that sends them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from shell_router.api import ApiSettings, opened_folder
from tests.fakes.api_server import Api, api, chat
from tests.fakes.moa import ScriptedMoa

ENDPOINT = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, content: str = "What is it?", **fields: object) -> dict[str, Any]:
    """A line that asks `small`, unless `fields` say otherwise."""
    body = chat(content, **{"model": "small", **fields})
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


def questions(*models: str) -> list[object]:
    """A line per model, named by its place."""
    return [line(str(place), f"Question {place}?", model=model) for place, model in enumerate(models)]


def jsonl(*lines: object) -> bytes:
    """One JSON value per line."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@dataclass(frozen=True)
class BatchApi:
    """A running router with a folder at `path`, and the official client connected to it."""

    served: Api
    ai: openai.AsyncOpenAI
    path: Path

    async def upload(self, content: bytes, name: str = "questions.jsonl") -> str:
        """The id of a new file."""
        return (await self.ai.files.create(file=(name, content), purpose="batch")).id

    async def begin(self, *lines: object) -> Batch:
        """A new batch of these lines."""
        return await self.begin_on(await self.upload(jsonl(*lines)))

    async def begin_on(self, file_id: str) -> Batch:
        """A new batch on an uploaded file."""
        return await self.ai.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")

    async def ended(self, batch: Batch) -> Batch:
        """The batch once it has ended."""
        return await self.when(batch, lambda seen: seen.status in ENDS)

    async def when(self, batch: Batch, holds: Callable[[Batch], bool], limit_s: float = 30.0) -> Batch:
        """The batch once `holds` is true of it."""
        async with asyncio.timeout(limit_s):
            while not holds(batch):
                batch = await self.ai.batches.retrieve(batch.id)
        return batch

    async def answers(self, batch: Batch) -> dict[str, str]:
        """What each line in the output file was answered."""
        results = await self.results(batch.output_file_id)
        return {name: one["response"]["body"]["choices"][0]["message"]["content"] for name, one in results.items()}

    async def results(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """A result file's lines by their custom_id; each stands there once."""
        if file_id is None:
            return {}
        listed = [json.loads(one) for one in (await self.ai.files.content(file_id)).text.splitlines()]
        results = {one["custom_id"]: one for one in listed}
        assert len(results) == len(listed)
        return results


@asynccontextmanager
async def batch_api(
    path: Path,
    moa: ScriptedMoa | None = None,
    settings: ApiSettings | None = None,
    *,
    key: str = "none",
    wall: Callable[[], float] = time.time,
) -> AsyncIterator[BatchApi]:
    """Serve while the context is open; a later one on the same `path` goes on where this one stood."""
    with opened_folder(path) as folder:
        async with api(moa, settings, batch_folder=folder, wall=wall) as served, client(served, key) as ai:
            yield BatchApi(served, ai, path)


@asynccontextmanager
async def client(served: Api, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client with an API key."""
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as connected:
        yield connected
