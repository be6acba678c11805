"""Trees of 9-3-1 agents: one request to our router, or a client that runs the layers itself, each
behind a barrier.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import orjson

from benchmarks.router_overhead.load import ANSWER_S, Connection, answer_body, connect
from benchmarks.router_overhead.setups import Percentiles, Spent, Watched, percentiles

LEAVES, CLUSTER = 9, 3
QUESTION = (
    "A train leaves at nine and travels for three hours and twelve minutes. When does it "
    "arrive, and why? "
)
Ask = Callable[[str], Awaitable[str]]
"""A question to the root's answer."""


@dataclass(frozen=True, slots=True)
class TreeFigures:
    """Of whole trees."""

    trees: int
    spent: Spent
    latency: Percentiles


async def measure_trees(asks: Sequence[Ask], watched: Watched, trees_each: int) -> TreeFigures:
    """Every one of `asks` has `trees_each` questions answered, one after the other; all of them at
    the same time.
    """
    times_s: list[float] = []

    async def one(number: int, ask: Ask) -> None:
        for count in range(trees_each):
            started_s = time.monotonic()
            answer = await ask(f"{QUESTION * 4}({number}.{count})")
            times_s.append(time.monotonic() - started_s)
            if not answer:
                raise RuntimeError("a tree had no answer")

    async def load() -> None:
        await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))

    await asyncio.gather(*(ask(f"warm up {number}") for number, ask in enumerate(asks)))
    spent = await watched.spent(load)
    return TreeFigures(len(times_s), spent, percentiles(times_s))


# --- one request per tree


@asynccontextmanager
async def routed_trees(url: str, topology: str, count: int) -> AsyncIterator[list[Ask]]:
    """`count` clients of our router, whose topology runs inside it."""
    connections = [await connect(url) for _ in range(count)]
    try:
        yield [_routed(connection, topology) for connection in connections]
    finally:
        for connection in connections:
            connection.close()


def _routed(connection: Connection, topology: str) -> Ask:
    async def ask(question: str) -> str:
        body = {"model": topology, "messages": [{"role": "user", "content": question}]}
        answer = await connection.post("/v1/chat/completions", orjson.dumps(body))
        return str(orjson.loads(answer_body(answer))["choices"][0]["message"]["content"])

    return ask


# --- a request per agent

Generate = Callable[[int, str], Awaitable[str]]
"""The output of a prompt, asked for on one of the client's connections."""


@asynccontextmanager
async def barrier_trees(
    url: str, new_tokens: int, count: int, *, stream: bool
) -> AsyncIterator[list[Ask]]:
    """`count` clients that run the layers themselves, as lean as this benchmark's own client is."""
    connections = [
        [await connect(url, quick_acks=True) for _ in range(LEAVES)] for _ in range(count)
    ]
    try:
        yield [_layered(_lean(own, new_tokens, stream)) for own in connections]
    finally:
        for connection in (one for own in connections for one in own):
            connection.close()


def _lean(connections: Sequence[Connection], new_tokens: int, stream: bool) -> Generate:
    async def generate(slot: int, prompt: str) -> str:
        body = answer_body(
            await connections[slot].post("/generate", _body(prompt, new_tokens, stream))
        )
        return _streamed_text(body) if stream else str(orjson.loads(body)["text"])

    return generate


@asynccontextmanager
async def aiohttp_trees(url: str, new_tokens: int, count: int) -> AsyncIterator[list[Ask]]:
    """`count` clients that run the layers themselves with a general HTTP client, as people write
    them.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_S)
    ) as session:

        async def generate(_slot: int, prompt: str) -> str:
            sent = _body(prompt, new_tokens, stream=False)
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/generate", data=sent, headers=headers) as response:
                response.raise_for_status()
                return str((await response.json())["text"])

        yield [_layered(generate)] * count


def _layered(generate: Generate) -> Ask:
    async def ask(question: str) -> str:
        leaves = await asyncio.gather(
            *(generate(slot, _prompt(question, ())) for slot in range(LEAVES))
        )
        clusters = [leaves[at : at + CLUSTER] for at in range(0, LEAVES, CLUSTER)]
        middle = await asyncio.gather(
            *(generate(slot, _prompt(question, own)) for slot, own in enumerate(clusters))
        )
        return await generate(0, _prompt(question, middle))

    return ask


def _prompt(question: str, outputs: Sequence[str]) -> str:
    if not outputs:
        return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    listed = "".join(
        f"\n\nResponse {number}:\n{output}" for number, output in enumerate(outputs, 1)
    )
    task = (
        "Below are a question and several responses to it. Write one answer that is better "
        "than each of them."
    )
    turn = f"{task}\n\nQuestion:\n{question}{listed}"
    return f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


def _body(prompt: str, new_tokens: int, stream: bool) -> bytes:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    return orjson.dumps({"text": prompt, "sampling_params": sampling, "stream": stream})


def _streamed_text(body: bytes) -> str:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(orjson.loads(event)["text"] for event in events)
