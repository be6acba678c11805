"""How long hostile requests hold up the router's event loop, in CPU time of its thread.

    python benchmarks/stalls.py [--json]

The router serves `small` on a scripted pair. A client in another process sends the hostile requests
of the test suite, and bodies of 8 and 10 MB, one after the other. `longest_ms` is the most CPU time
that one turn of the loop took meanwhile, so that other work on the machine does not count; `route`
is where that request went. `answers` are the statuses.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from report import Row

    from tests.fakes.hostile_inputs import Hostile

ROOT = Path(__file__).parents[1]
BODY_BYTES = 8 * 2**20 - 1000


class WatchedLoop(asyncio.SelectorEventLoop):
    """Remembers the CPU seconds of its longest turn."""

    longest_s = 0.0

    def _run_once(self) -> None:
        began_s = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.thread_time() - began_s)


def main() -> int:
    """Measure and print."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    options = found.parse_args()
    sys.path.insert(0, str(ROOT))
    from report import report

    with (
        tempfile.TemporaryDirectory(prefix="stalls-") as folder,
        asyncio.Runner(loop_factory=WatchedLoop) as runner,
    ):
        rows = runner.run(measured(Path(folder)))
    title = "Longest CPU time of a turn of the event loop, by hostile requests"
    report(title, rows, engine="a scripted pair", simulated=False, as_json=options.json)
    return 0


async def measured(folder: Path) -> "list[Row]":
    """A row per family of requests, and per large body."""
    from benchmarks.tenants import deployment, running_engine
    from shell_router.app import serve_deployment
    from tests.fakes.hostile_inputs import FAMILIES

    loop = asyncio.get_running_loop()
    assert isinstance(loop, WatchedLoop)
    families = {**FAMILIES, **large_bodies()}
    with ProcessPoolExecutor(1, get_context("spawn")) as client:
        async with (
            running_engine("scripted", folder) as pairs,
            serve_deployment(deployment(pairs, folder)) as url,
        ):
            gc.freeze()  # as `shell-router serve`
            gc.set_threshold(20_000, 10, 10)
            await loop.run_in_executor(client, status_of, url, FAMILIES["chats"][0])
            rows = []
            for name, family in families.items():
                longest_s, answers, route = 0.0, Counter[int](), ""
                for one in family:
                    loop.longest_s = 0.0
                    answers[await loop.run_in_executor(client, status_of, url, one)] += 1
                    if loop.longest_s > longest_s:
                        longest_s, route = loop.longest_s, one.path
                said = ", ".join(
                    f"{number} x {status}" for status, number in sorted(answers.items())
                )
                rows.append(
                    {
                        "requests": name,
                        "longest_ms": 1e3 * longest_s,
                        "answers": said,
                        "route": route,
                    }
                )
    return rows


def status_of(url: str, one: "Hostile") -> int:
    """The status that the request gets from the router; 0 where the connection ends."""
    import http.client

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {
        "Authorization": "Bearer sk-alice",
        "Content-Type": "application/json",
        **one.headers,
    }
    try:
        connection.request(one.method, one.path, one.body, headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def large_bodies() -> "Mapping[str, Sequence[Hostile]]":
    """Near the limit of a body, and over it."""
    from tests.fakes.hostile_inputs import AGENT, BASES, CHAT, FILES, GENERATE, Hostile, post

    def says(content: str, role: str = "user") -> list[dict[str, Any]]:
        return [{"role": role, "content": content}]

    def filled(piece: bytes) -> bytes:
        return b'{"odd":[%s]}' % b",".join([piece] * (BODY_BYTES // (len(piece) + 1)))

    words, chat = "word " * (BODY_BYTES // 5), BASES[CHAT]
    marks = "".join(f"\ue000{number}\ue001" for number in range(BODY_BYTES // 20))
    agent = {name: value for name, value in BASES[AGENT].items() if name != "prompt"}
    form = b"".join(
        b'--B\r\nContent-Disposition: form-data; name="f%d"\r\n\r\nx\r\n' % n
        for n in range(150_000)
    )
    kind = {"Content-Type": "multipart/form-data; boundary=B"}
    return {
        "8 MB of words in a chat": [post(CHAT, {**chat, "messages": says(words)})],
        "8 MB of words for an agent": [post(AGENT, {**agent, "prompt": words})],
        "8 MB of words in /generate": [post(GENERATE, {"text": words})],
        "8 MB of marks": [post(AGENT, {**agent, "messages": says(marks)})],
        "8 MB of empty lists": [post(CHAT, filled(b"[]"))],
        "8 MB of numbers": [post(CHAT, filled(b"1"))],
        "8 MB of escapes": [post(CHAT, filled(b'"%s"' % (b"\\u00e4" * 100_000)))],
        "8 MB of token ids": [
            post(GENERATE, b'{"input_ids":[1%s]}' % (b",1" * (BODY_BYTES // 2 - 10)))
        ],
        "8 MB of a role": [post(CHAT, {**chat, "messages": says("Hi", "x" * BODY_BYTES)})],
        "8 MB of stops": [post(CHAT, {**chat, "stop": ["stop"] * 45_000})],
        "8 MB of nested objects": [
            post(CHAT, b'{"a":' * (BODY_BYTES // 6) + b"1" + b"}" * (BODY_BYTES // 6))
        ],
        "10 MB of words": [post(CHAT, {**chat, "messages": says("word " * 2_000_000)})],
        "10 MB of form fields": [Hostile("POST", FILES, form, kind)],
    }


if __name__ == "__main__":
    sys.exit(main())
