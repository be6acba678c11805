"""Answers with the headers that all of them carry."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web

from shell_router.api.services import IGNORED, PLACED, REQUEST_ID, TRACE
from shell_router.core.events import ModelChosen, StepChosen

UNFIT_FOR_HEADER = re.compile(r"[^\w./-]", re.ASCII)
NAMED_IGNORED = 16
NAMED_CHOICES = 16


def common_headers(request: web.Request) -> dict[str, str]:
    """x-request-id on every answer; x-trace-id where a run began; x-model-choice where a model was chosen for it;
    x-steps where steps were; x-ignored-fields where some were ignored.

    x-shell-router-engine where it is known by then which engines answer, and why.
    """
    headers = {"Server": "shell-router", "x-request-id": request[REQUEST_ID]}
    placed = request[PLACED]() if PLACED in request else ()
    if TRACE in request:
        trace = request[TRACE]
        headers["x-trace-id"] = trace.id
        placed = trace.placed()
        if trace.choices:
            headers["x-model-choice"] = "; ".join(map(_told, trace.choices[:NAMED_CHOICES]))
        if trace.steps:
            headers["x-steps"] = "; ".join(map(_step, trace.steps[:NAMED_CHOICES]))
    if placed:
        headers["x-shell-router-engine"] = "; ".join(map(str, placed))
    if IGNORED in request:
        headers["x-ignored-fields"] = request[IGNORED]
    return headers


def note_ignored(request: web.Request, names: Sequence[str]) -> None:
    """Have the answer say which of the body's fields had no effect: a misspelt one would go unnoticed."""
    if names:
        fit = (UNFIT_FOR_HEADER.sub("?", name[:64]) for name in names[:NAMED_IGNORED])
        request[IGNORED] = ", ".join(fit)


def json_reply(
    request: web.Request, body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """`body` as JSON."""
    return web.Response(
        body=orjson.dumps(body),
        status=status,
        content_type="application/json",
        headers={**common_headers(request), **(headers or {})},
    )


def _step(chosen: StepChosen) -> str:
    """As in `quick: start 1`: rule 1 of the start led to it. The trace says why."""
    return f"{chosen.step}: {chosen.after} {chosen.rule}"


def _told(choice: ModelChosen) -> str:
    """As in `root=large, chimera: better`, the first agent's name standing for all that share the choice."""
    agent, model = (UNFIT_FOR_HEADER.sub("?", name[:64]) for name in (choice.agents[0], choice.model))
    return f"{agent}={model}, {choice.policy}: {choice.why}"
