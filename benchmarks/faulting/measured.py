"""One fault on one router, from a pair that is whole to the next request that is served, and the table's rows."""

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median, median_high
from time import monotonic
from typing import Any

from faulting.client import COMPLETE, LIMIT_S, Client, connected_client
from faulting.engines import Engines
from faulting.faults import SHORT_PROMPT, Fault, meets_what_is_away
from faulting.refusing import refusing_prefill
from faulting.routers import ROUTERS, Legs, Setting, running_router
from faulting.scene import Outcome, Scene

NEXT_TOKENS = 8
PAUSE_S = 0.5
CASE_LIMIT_S = 300.0
"""No case takes longer, whatever hangs."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One row's request, once, and when the next request was served with all servers running again."""

    outcome: Outcome
    next_ok: bool
    next_s: float


async def measured_rows(engines: Engines, faults: Mapping[str, Fault], rounds: int, folder: Path) -> list[Row]:
    """One row for each fault and router, figures being medians over the rounds."""
    cases: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for at in range(rounds):
        for name, fault in faults.items():
            for router in list(ROUTERS)[:: -1 if at % 2 else 1]:
                for row, case in (await _cases(engines, name, fault, router, folder)).items():
                    cases[row, router].append(case)
                    print(f"{row}, {router}: {case}", file=sys.stderr, flush=True)
    rows = [row for name, fault in faults.items() for row in (name, fault.away) if row is not None]
    return [_row(row, router, cases[row, router]) for row in rows for router in ROUTERS]


async def _cases(engines: Engines, name: str, fault: Fault, router: str, folder: Path) -> dict[str, Case]:
    """By row. The router is a fresh one, so that no breaker remembers another fault."""
    async with asyncio.timeout(CASE_LIMIT_S), AsyncExitStack() as stack:
        await engines.make_whole(fault.decode_context)
        refusing = await stack.enter_async_context(refusing_prefill(engines.prefill.url))
        prefill_url = refusing.url if fault.refusing else engines.prefill.url
        legs = Legs(prefill_url, engines.decode.url, engines.bootstrap_port)
        url = await stack.enter_async_context(running_router(router, Setting(legs, fault.stall_s, folder)))
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
    """Whether the next request is served at once, and seconds until one is, infinite where none is within LIMIT_S."""
    began_s = monotonic()
    tries = 0
    while monotonic() - began_s < LIMIT_S:
        tries += 1
        ended = await client.ask(SHORT_PROMPT, NEXT_TOKENS).end()
        if ended.told == COMPLETE:
            return tries == 1, ended.since(began_s)
        await asyncio.sleep(PAUSE_S)
    return False, inf


def _row(fault: str, router: str, cases: Sequence[Case]) -> Row:
    errors_s = [case.outcome.error_s for case in cases if case.outcome.error_s is not None]
    told = Counter(case.outcome.told for case in cases)
    return {
        "fault": fault,
        "router": router,
        "error_s": _shown_s(median(errors_s)) if errors_s else None,
        "client_got": told.most_common(1)[0][0],
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
