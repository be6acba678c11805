"""Lazy answers: a chat completion that gives a marker at once, while its agent begins in a program.

A later prompt that holds markers is split at them into slots, and prefilled while those agents
still write. So a framework that knows nothing of the router overlaps its agents as a topology does.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from shell_router.api.admission import ADMISSION
from shell_router.api.agents import identifier, read_prefill
from shell_router.api.conversation import MARKER, PLAIN, marker_of, split_text
from shell_router.api.drain import DRAIN
from shell_router.api.fields import Fields, query_number, refused
from shell_router.api.replies import json_reply
from shell_router.api.runs import Run, refuse_key
from shell_router.api.services import SERVICES, SETTINGS, TENANT
from shell_router.core.events import AgentTokens, Emit, Event
from shell_router.errors import InvalidField, PrecursorTimeout, UnknownProgram
from shell_router.http.app import Request, Response
from shell_router.moa.programs import Programs
from shell_router.moa.requests import (
    AgentRequest,
    AgentUsage,
    Answer,
    MoaRequest,
    OutputOf,
    Segment,
)
from shell_router.routing.increments import tokens_per_event
from shell_router.topology import AUTO

PROGRAM_HEADER = "x-shell-router-program"
LAZY_HEADER = "x-shell-router-lazy"

OUTPUT_WAIT_S = 30.0
C = TypeVar("C", bound=MoaRequest)


def read_wish(body: Fields, headers: Mapping[str, str]) -> tuple[str | None, bool]:
    """The program that a chat completion belongs to, and whether it is lazy. Raises
    InvalidField."""
    if body.raw("program") is None:
        program = None
    else:
        program = identifier(body, "program")
    if PROGRAM_HEADER in headers:
        named = identifier(Fields(headers), PROGRAM_HEADER)
        if program not in (None, named):
            raise body.refuse(
                "program", f"differs from the header {PROGRAM_HEADER}", "Send only one of them."
            )
        program = named
    asked = headers.get(LAZY_HEADER, "false").lower()
    if asked not in ("true", "false"):
        raise InvalidField(f"The header {LAZY_HEADER} must be true or false.", field=LAZY_HEADER)
    is_lazy = body.flag("lazy") or asked == "true"
    if is_lazy and program is None:
        raise body.refuse(
            "program",
            "is missing",
            "A lazy answer needs one: name it with an id of your own per run.",
        )
    return program, is_lazy


async def of_program(
    request: Request,
    body: Fields,
    chat: C,
    models: Sequence[str],
    program: str | None,
    *,
    lazy: bool,
) -> AgentRequest | C:
    """A chat that is lazy or has markers, as an agent of its program; where it asks no `models` but
    a topology, with the outputs in its messages. Raises InvalidField, AgentFailed and
    PrecursorTimeout."""
    if chat.offer is not None or any(turn.keys() - PLAIN for turn in chat.messages):
        what = (
            "cannot go with tools, nor with their calls, results or reasoning_content in messages"
        )
        if lazy:  # code reads calls and their results
            raise body.refuse("lazy", what, "Ask without it.")
        remedy = "First get the text from GET /v1/agent/outputs/{marker}."
        raise body.refuse("messages", f"hold a lazy answer's marker, which {what}", remedy)
    said, reads = _split(chat.messages)
    program = _program_read(request.app[SERVICES].programs, chat.tenant, reads, program)
    if models:
        refuse_key(request, "lazy answers or their markers")
        return _agent_of(request, body, chat, models, program, said, lazy=lazy)
    texts = await _outputs(request, program, reads, chat.timeout_s)
    messages = tuple(
        {
            "role": role,
            "content": "".join(one if isinstance(one, str) else texts[one.agent] for one in turn),
        }
        for role, turn in said
    )
    return replace(chat, messages=messages)


Said = tuple[tuple[str, tuple[Segment, ...]], ...]
"""Messages split at their markers, by their roles."""


def _split(messages: Sequence[Mapping[str, Any]]) -> tuple[Said, tuple[str, ...]]:
    """The messages split, and the agents that their markers stand for, each once. Raises
    InvalidField for altered markers."""
    said = tuple(
        (turn["role"], split_text(turn["content"], f"messages[{at}].content"))
        for at, turn in enumerate(messages)
    )
    found = (one.agent for _, segments in said for one in segments if isinstance(one, OutputOf))
    return said, tuple(dict.fromkeys(found))


def _program_read(
    programs: Programs, tenant: str, reads: Sequence[str], program: str | None
) -> str:
    """The program of these agents, and of the request that reads them. Raises InvalidField for
    another's markers.
    """
    for agent in reads:
        found = programs.find_chat_program(tenant, agent)
        if found is None or (program is not None and found != program):
            what = (
                f"hold {marker_of(agent)}, which is no answer of {program or 'a program of yours'}"
            )
            remedy = "It has expired, was altered, or is another program's: begin the program anew."
            raise refused("messages", what, remedy)
        program = found
    assert program is not None, "a request that is not lazy reads an agent"
    return program


def _agent_of(
    request: Request,
    body: Fields,
    chat: MoaRequest,
    models: Sequence[str],
    program: str,
    said: Said,
    *,
    lazy: bool,
) -> AgentRequest:
    """The chat completion as an agent of `program`, with the prompt that the model gets from the
    same plain chat.

    A `lazy` one writes in pieces: readers that are not known yet want them early.
    """
    if lazy:
        pieces = {"stream_interval": tokens_per_event(0.0, judged=False)}
    else:
        pieces = {}
    system = [segments for role, segments in said if role == "system"]
    if system:
        first = [("system", tuple(one for turn in system for one in ("\n\n", *turn))[1:])]
    else:
        first = []
    return AgentRequest(
        tenant=chat.tenant,
        end_user=chat.end_user,
        program=program,
        agent=request.app[SERVICES].new_id(),
        model=models[0] if len(models) == 1 else AUTO,
        candidates=tuple(models) if len(models) > 1 else (),
        messages=(*first, *(turn for turn in said if turn[0] != "system")),
        sampling={**chat.sampling, **pieces},
        prefill=read_prefill(body.object("prefill")),
        wait_s=chat.timeout_s,
        timeout_s=chat.timeout_s,
        chat=True,
        chat_template_kwargs=chat.chat_template_kwargs,
        max_thinking_tokens=chat.max_thinking_tokens,
        is_read=lazy,
    )


async def begin_lazy(request: Request, run: Run, emit: Emit | None) -> Answer:
    """The marker in place of the agent's answer. The agent runs on by itself; raises what is
    refused before that.
    """
    asked = run.asked
    assert isinstance(asked, AgentRequest), "only agents are lazy"
    begun: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def mark(_: Event) -> None:
        if not begun.done():
            begun.set_result(None)

    task = request.app[ADMISSION].detach(request, run.run(asked, mark))
    try:
        await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # no client will know of it
        task.cancel()
        raise
    if task.done():
        task.result()
    text = marker_of(asked.agent)
    if emit is not None:
        emit(AgentTokens(0.0, asked.agent, (), text))
    return Answer(text, "stop", {asked.agent: AgentUsage(asked.model, 0, 0, 0, "finished")})


async def _outputs(
    request: Request, program: str, reads: Sequence[str], limit_s: float
) -> Mapping[str, str]:
    """What these agents wrote, once all have ended. Raises AgentFailed and PrecursorTimeout."""
    services = request.app[SERVICES]
    texts = {}
    ends_s = services.clock() + limit_s
    with request.app[DRAIN].deadline():
        for agent in reads:
            left_s = max(0.0, ends_s - services.clock())
            text = await services.programs.read_output(request[TENANT], program, agent, left_s)
            if text is None:
                remedy = "Allow more time."
                raise PrecursorTimeout(
                    f"{marker_of(agent)} had no output within {limit_s:g} s.", remedy=remedy
                )
            texts[agent] = text
    return texts


async def show_output(request: Request) -> Response:
    """Return the text that a marker stands for.

    The status is 202 while its agent still writes after `wait_s`.
    """
    services = request.app[SERVICES]
    tenant = request[TENANT]
    named = request.match["marker"]
    marker = MARKER.fullmatch(named)
    agent = marker[1] if marker else named
    program = services.programs.find_chat_program(tenant, agent)
    if program is None:
        raise UnknownProgram(
            "No lazy answer of yours has that marker.", remedy="It may have expired: ask again."
        )
    limit_s = request.app[SETTINGS].request_timeout_s
    wait_s = query_number(request.query, "wait_s", min(OUTPUT_WAIT_S, limit_s), limit_s)
    with request.app[DRAIN].deadline():
        text = await services.programs.read_output(tenant, program, agent, wait_s)
    state = "running" if text is None else "finished"
    body = {
        "object": "agent.output",
        "program": program,
        "agent": agent,
        "state": state,
        "text": text,
    }
    return json_reply(request, body, status=202 if text is None else 200)
