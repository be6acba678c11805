"""Lazy answers: a chat completion that gives a marker at once, while its agent begins in a program.

A later prompt that holds markers is split at them into slots, and prefilled while those agents
still write. So a framework that knows nothing of the router overlaps its agents as a topology does.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from shell_router.api.admission import ADMISSION
from shell_router.api.bodies import Wish, query_number
from shell_router.api.conversation import MARKER, PLAIN, marker_of, split_text
from shell_router.api.fields import SharedFields
from shell_router.api.replies import json_reply
from shell_router.api.runs import Run, require_no_key
from shell_router.api.services import SERVICES, SETTINGS, TENANT
from shell_router.core.budget import UNLIMITED
from shell_router.core.events import AgentTokens, Emit, Event
from shell_router.core.sampling import require_possible
from shell_router.core.validation import field_error
from shell_router.errors import PrecursorTimeout, UnknownProgram
from shell_router.http.app import Request, Response
from shell_router.moa.deadline import Deadline
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
from shell_router.topology import AUTO, Prefill

OUTPUT_WAIT_S = 30.0
C = TypeVar("C", bound=MoaRequest)


async def read_program(
    request: Request, body: SharedFields, chat: C, models: Sequence[str], wish: Wish
) -> AgentRequest | C:
    """Return a chat that is lazy or has markers as an agent of its program.

    Without `models` a topology is to answer, and the chat comes back with the outputs in its
    messages.

    Raises:
        InvalidField: A marker is altered or another program's, or the chat has tools.
        AgentFailed: An agent that a topology would read has failed.
        PromptTooLong: The messages with their outputs are too long for the longest context.
        PrecursorTimeout: It has written nothing in time.
    """
    if chat.offer is not None or any(turn.keys() - PLAIN for turn in chat.messages):
        what = (
            "cannot go with tools, nor with their calls, results or reasoning_content in messages"
        )
        if wish.is_lazy:  # code reads calls and their results
            raise field_error("lazy", what, "Ask without it.")
        remedy = "First get the text from GET /v1/agent/outputs/{marker}."
        raise field_error("messages", f"hold a lazy answer's marker, which {what}", remedy)
    turns, reads = _split(chat.messages)
    program = _program_read(request.app[SERVICES].programs, chat.tenant, reads, wish.program)
    if models:
        require_no_key(request, "lazy answers or their markers")
        agent = request.app[SERVICES].new_id()
        prefill = Prefill(**body.get("prefill", {}))
        return _agent_of(chat, models, program, agent, turns, prefill, is_lazy=wish.is_lazy)
    texts = await _outputs(request, program, reads, chat.timeout_s)
    served = request.app[SERVICES].models.values()
    characters = sum(len(_text_of(part, texts)) for _, parts in turns for part in parts)
    require_possible(characters, max([model.context_length for model in served]))
    for model in served:
        texts = {agent: model.tokenizer.control.quote(text) for agent, text in texts.items()}
    messages = tuple(
        {"role": role, "content": "".join(_text_of(segment, texts) for segment in segments)}
        for role, segments in turns
    )
    return replace(chat, messages=messages)


def _text_of(segment: Segment, texts: Mapping[str, str]) -> str:
    return segment if isinstance(segment, str) else texts[segment.agent]


Turns = tuple[tuple[str, tuple[Segment, ...]], ...]
"""Messages split at their markers, with their roles."""


def _split(messages: Sequence[Mapping[str, Any]]) -> tuple[Turns, tuple[str, ...]]:
    """Return the messages split, and the agents that their markers stand for, each once.

    Raises:
        InvalidField: A marker is altered.
    """
    turns = tuple(
        (turn["role"], split_text(turn["content"], f"messages[{at}].content"))
        for at, turn in enumerate(messages)
    )
    segments = [segment for _, of_turn in turns for segment in of_turn]
    agents = [segment.agent for segment in segments if isinstance(segment, OutputOf)]
    return turns, tuple(dict.fromkeys(agents))


def _program_read(
    programs: Programs, tenant: str, reads: Sequence[str], program: str | None
) -> str:
    """Return the program of these agents; raises InvalidField for another one's markers."""
    for agent in reads:
        of_agent = programs.find_chat_program(tenant, agent)
        if of_agent is None or (program is not None and of_agent != program):
            what = (
                f"hold {marker_of(agent)}, which is no answer of {program or 'a program of yours'}"
            )
            remedy = "It has expired, was altered, or is another program's: begin the program anew."
            raise field_error("messages", what, remedy)
        program = of_agent
    assert program is not None, "a request that is not lazy reads an agent"
    return program


def _agent_of(
    chat: MoaRequest,
    models: Sequence[str],
    program: str,
    agent: str,
    turns: Turns,
    prefill: Prefill,
    *,
    is_lazy: bool,
) -> AgentRequest:
    """Return the chat as an agent of `program`, with the prompt of the same plain chat."""
    if chat.budget != UNLIMITED:
        what = "cannot go with lazy answers, or with what reads them"
        raise field_error("budget", what, "Leave it out, or give the key a program_budget.")
    sampling = chat.sampling
    if is_lazy:  # readers that are not known yet want small pieces
        sampling = {**sampling, "stream_interval": tokens_per_event(0.0, judged=False)}
    return AgentRequest(
        tenant=chat.tenant,
        end_user=chat.end_user,
        tier=chat.tier,
        session=chat.session,
        program=program,
        agent=agent,
        model=models[0] if len(models) == 1 else AUTO,
        candidates=tuple(models) if len(models) > 1 else (),
        messages=turns,
        sampling=sampling,
        prefill=prefill,
        wait_s=chat.timeout_s,
        timeout_s=chat.timeout_s,
        chat=True,
        chat_template_kwargs=chat.chat_template_kwargs,
        max_thinking_tokens=chat.max_thinking_tokens,
        is_read=is_lazy,
    )


async def begin_lazy(request: Request, run: Run, emit: Emit | None = None) -> Answer:
    """Return the marker in place of the answer, once the agent has begun; it runs on by itself."""
    agent = run.asked
    assert isinstance(agent, AgentRequest), "only agents are lazy"
    begun: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def mark(_: Event) -> None:
        if not begun.done():
            begun.set_result(None)

    task = request.app[ADMISSION].detach(request, run.run(agent, mark))
    try:
        await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # no client will know of it
        task.cancel()
        raise
    if task.done():
        task.result()
    text = marker_of(agent.agent)
    if emit is not None:
        emit(AgentTokens(0.0, agent.agent, (), text))
    return Answer(text, "stop", {agent.agent: AgentUsage(agent.model, 0, 0, 0, "finished")})


async def _outputs(
    request: Request, program: str, reads: Sequence[str], limit_s: float
) -> Mapping[str, str]:
    """Return the outputs once all have ended; raises AgentFailed and PrecursorTimeout."""
    services = request.app[SERVICES]
    texts = {}
    ends_s = services.clock() + limit_s
    with Deadline(None, services.deadlines):
        for agent in reads:
            left_s = max(0.0, ends_s - services.clock())
            text = await services.programs.read_output(request[TENANT], program, agent, left_s)
            if text is None:
                raise PrecursorTimeout(
                    f"{marker_of(agent)} had no output within {limit_s:g} s.",
                    remedy="Allow more time.",
                )
            texts[agent] = text
    return texts


async def show_output(request: Request) -> Response:
    """Return the text that a marker stands for.

    The status is 202 while its agent still writes after `wait_s`.
    """
    services = request.app[SERVICES]
    tenant = request[TENANT]
    part = request.match["marker"]
    marker = MARKER.fullmatch(part)
    agent = marker[1] if marker else part
    program = services.programs.find_chat_program(tenant, agent)
    if program is None:
        raise UnknownProgram(
            "No lazy answer of yours has that marker.", remedy="It may have expired: ask again."
        )
    limit_s = request.app[SETTINGS].request_timeout_s
    wait_s = query_number(request.query, "wait_s", min(OUTPUT_WAIT_S, limit_s), limit_s)
    held = request.app[ADMISSION].wait(request) if wait_s else nullcontext()
    with held, Deadline(None, services.deadlines):
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
