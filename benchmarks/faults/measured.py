"""What breaks and what becomes of requests: scenes, faults and measured rows."""

import asyncio
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median, median_high
from time import monotonic
from typing import Any

from benchmarks.faults.client import (
    COMPLETE,
    LIMIT_S,
    Client,
    RefusingPrefill,
    Request,
    connected_client,
    refusing_prefill,
)
from benchmarks.faults.servers import (
    CONTEXT,
    PREFILL_CONTEXT,
    SHORT_DECODE_CONTEXT,
    Engines,
    Legs,
    Setting,
    connect_router,
    list_routers,
)

LATER_S = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds until the request ended for the client, None where the client left; and what it
    received.

    `held` requests were on the servers LATER_S after the fault, `held_after` LATER_S after the
    client knew or left.
    """

    error_s: float | None
    received: str
    held: int
    held_after: int


class Scene:
    """The parts of one case. A fault calls `begin` when it strikes, then `ended` or `left`."""

    def __init__(self, engines: Engines, refusing: RefusingPrefill, client: Client) -> None:
        self.engines = engines
        self.refusing = refusing
        self.client = client
        self._began_s: float
        self._held: asyncio.Task[int]

    def begin(self) -> None:
        """The fault strikes, or a request that will meet it is sent, now."""
        self._began_s = monotonic()
        self._held = asyncio.create_task(self._held_later())

    async def ended(self, request: Request) -> Outcome:
        """What comes of a request whose client waits for it."""
        ended = await request.end()
        return await self._outcome(ended.since(self._began_s), ended.received)

    async def left(self, request: Request) -> Outcome:
        """What comes of a request whose client leaves now."""
        await request.leave()
        return await self._outcome(None, "-")

    async def _outcome(self, error_s: float | None, received: str) -> Outcome:
        self.engines.resume()
        held_after = await self._held_later()
        return Outcome(error_s, received, await self._held, held_after)

    async def _held_later(self) -> int:
        await asyncio.sleep(LATER_S)
        return await self.engines.held()


SHORT_PROMPT, LONG_PROMPT = 60, 12000
NEW_TOKENS = 4000
"""Decoding them takes much longer than anything that is measured."""
TOO_LONG_PROMPT = PREFILL_CONTEXT + 1000
USUAL_STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What strikes, and what the routers and the pair are set to for it.

    `stall_s` is our router's limit for a silent engine; `refusing` puts that server before prefill.
    Where a server is killed, `away` names the row of one more request, sent before the server is
    started again.
    """

    strike: Callable[[Scene], Awaitable[Outcome]]
    stall_s: float = USUAL_STALL_S
    decode_context: int = CONTEXT
    refusing: bool = False
    away: str | None = None


async def _prefill_refuses(scene: Scene) -> Outcome:
    scene.refusing.refuses = True
    return await _met(scene, SHORT_PROMPT)


async def _prefill_refuses_whole(scene: Scene) -> Outcome:
    scene.refusing.refuses = True
    return await _met(scene, SHORT_PROMPT, stream=False)


async def _too_long_for_prefill(scene: Scene) -> Outcome:
    return await _met(scene, TOO_LONG_PROMPT)


async def _too_long_for_decode(scene: Scene) -> Outcome:
    return await _met(scene, LONG_PROMPT)


async def meets_what_is_away(scene: Scene) -> Outcome:
    """Of a request sent after the one that met the fault, whose remains are cleared away first."""
    await scene.engines.clear()
    return await _met(scene, SHORT_PROMPT)


async def _met(scene: Scene, prompt_tokens: int, *, stream: bool = True) -> Outcome:
    """Of a request that meets a fault which is already there."""
    scene.begin()
    return await scene.ended(scene.client.ask(prompt_tokens, NEW_TOKENS, stream=stream))


async def _aborted_before_first_token(scene: Scene) -> Outcome:
    request = await _in_prefill(scene)
    scene.begin()
    await scene.engines.abort_all(scene.engines.decode)
    return await scene.ended(request)


async def _prefill_killed(scene: Scene) -> Outcome:
    request = await _in_prefill(scene)
    scene.begin()
    scene.engines.prefill.signal(signal.SIGKILL)
    return await scene.ended(request)


async def _client_leaves_during_prefill(scene: Scene) -> Outcome:
    request = await _in_prefill(scene)
    scene.begin()
    return await scene.left(request)


async def _client_leaves_during_decode(scene: Scene) -> Outcome:
    request = await _in_decode(scene)
    scene.begin()
    return await scene.left(request)


async def _decode_stalled(scene: Scene) -> Outcome:
    request = await _in_decode(scene)
    scene.begin()
    scene.engines.stall(scene.engines.decode)
    return await scene.ended(request)


async def _decode_killed(scene: Scene) -> Outcome:
    request = await _in_decode(scene)
    scene.begin()
    scene.engines.decode.signal(signal.SIGKILL)
    return await scene.ended(request)


async def _in_prefill(scene: Scene) -> Request:
    request = scene.client.ask(LONG_PROMPT, NEW_TOKENS)
    await scene.engines.prefilling()
    return request


async def _in_decode(scene: Scene) -> Request:
    request = scene.client.ask(SHORT_PROMPT, NEW_TOKENS)
    await request.streaming()
    return request


FAULTS: Mapping[str, Fault] = {
    "prefill answers 400": Fault(_prefill_refuses, refusing=True),
    "prefill answers 400, no stream": Fault(_prefill_refuses_whole, refusing=True),
    "prompt too long for prefill": Fault(_too_long_for_prefill),
    "prompt too long for decode": Fault(_too_long_for_decode, decode_context=SHORT_DECODE_CONTEXT),
    "aborted before the first token": Fault(_aborted_before_first_token),
    "client leaves during prefill": Fault(_client_leaves_during_prefill),
    "client leaves during decode": Fault(_client_leaves_during_decode),
    "decode stalled": Fault(_decode_stalled, stall_s=2.0),
    "prefill killed during prefill": Fault(_prefill_killed, away="prefill away, then restarted"),
    "decode killed mid-stream": Fault(_decode_killed, away="decode away, then restarted"),
}


NEXT_TOKENS = 8
PAUSE_S = 0.5
CASE_LIMIT_S = 300.0
"""No case takes longer, whatever hangs."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One row's request, once, and when the next request was served with all servers running
    again."""

    outcome: Outcome
    next_ok: bool
    next_s: float


async def measured_rows(
    engines: Engines, faults: Mapping[str, Fault], rounds: int, folder: Path
) -> list[Row]:
    """One row for each fault and router, figures being medians over the rounds."""
    cases: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for at in range(rounds):
        for name, fault in faults.items():
            for router in list(list_routers())[:: -1 if at % 2 else 1]:
                for row, case in (await _cases(engines, name, fault, router, folder)).items():
                    cases[row, router].append(case)
                    print(f"{row}, {router}: {case}", file=sys.stderr, flush=True)
    rows = [row for name, fault in faults.items() for row in (name, fault.away) if row is not None]
    return [_row(row, router, cases[row, router]) for row in rows for router in list_routers()]


async def _cases(
    engines: Engines, name: str, fault: Fault, router: str, folder: Path
) -> dict[str, Case]:
    """By row. The router is a fresh one, so that no breaker remembers another fault."""
    async with asyncio.timeout(CASE_LIMIT_S), AsyncExitStack() as stack:
        await engines.make_whole(fault.decode_context)
        refusing = await stack.enter_async_context(refusing_prefill(engines.prefill.url))
        prefill_url = refusing.url if fault.refusing else engines.prefill.url
        legs = Legs(prefill_url, engines.decode.url, engines.bootstrap_port)
        url = await stack.enter_async_context(
            connect_router(router, Setting(legs, fault.stall_s, folder))
        )
        client = await stack.enter_async_context(connected_client(url))
        scene = Scene(engines, refusing, client)
        outcomes = {name: await fault.strike(scene)}
        if fault.away is not None:
            outcomes[fault.away] = await meets_what_is_away(scene)
        refusing.refuses = False
        engines.start()
        next_ok, next_s = await _next(client)
        return {row: Case(outcome, next_ok, next_s) for row, outcome in outcomes.items()}


async def _next(client: Client) -> tuple[bool, float]:
    """Whether the next request is served at once, and seconds until one is, infinite where none is
    within LIMIT_S.
    """
    began_s = monotonic()
    tries = 0
    while monotonic() - began_s < LIMIT_S:
        tries += 1
        ended = await client.ask(SHORT_PROMPT, NEXT_TOKENS).end()
        if ended.received == COMPLETE:
            return tries == 1, ended.since(began_s)
        await asyncio.sleep(PAUSE_S)
    return False, inf


def _row(fault: str, router: str, cases: Sequence[Case]) -> Row:
    errors_s = [case.outcome.error_s for case in cases if case.outcome.error_s is not None]
    received = Counter(case.outcome.received for case in cases)
    return {
        "fault": fault,
        "router": router,
        "error_s": _shown_s(median(errors_s)) if errors_s else None,
        "client_got": received.most_common(1)[0][0],
        "held": median_high(case.outcome.held for case in cases),
        "held_after": median_high(case.outcome.held_after for case in cases),
        "next": _share(sum(case.next_ok for case in cases), len(cases)),
        "next_s": _shown_s(median(case.next_s for case in cases)),
    }


def _shown_s(seconds: float) -> float | str:
    return f"> {LIMIT_S:g}" if seconds > LIMIT_S else seconds


def _share(good: int, of: int) -> str:
    if of > 1:
        return f"{good} of {of}"
    return "served" if good else "failed"
