"""/v1/agent/requests: single agents of programs that somebody else's framework walks."""

from aiohttp import web

from shell_router.api.agent_body import read_agent_body
from shell_router.api.agent_reply import AgentFrames, agent_answer, program_reply
from shell_router.api.bodies import read_body
from shell_router.api.drain import DRAIN
from shell_router.api.fields import parse_body
from shell_router.api.live_run import LiveRun
from shell_router.api.observed import Observed
from shell_router.api.recorded import run_of_agent
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import SERVICES, SETTINGS, TENANT, TRACE, Emit
from shell_router.api.streaming import stream_run
from shell_router.execution import AGENT_REQUEST, AgentRequest, Answer

TARGET = AGENT_REQUEST
"""What traces and metrics call these runs: clients' own program names would make metrics without bound."""


async def run_agent(request: web.Request) -> web.StreamResponse:
    """POST: run one agent to its end."""
    body = parse_body(await read_body(request))
    asked = read_agent_body(body, request[TENANT], request.app[SETTINGS].request_timeout_s)
    note_ignored(request, body.unread)
    run = AgentRequestRun(request, asked.request)
    return await (run.streamed() if asked.stream else run.whole())


async def show_program(request: web.Request) -> web.Response:
    """GET: the program's agents, their states and outputs so far."""
    programs = request.app[SERVICES].programs
    return json_reply(request, program_reply(programs.state(request[TENANT], request.match_info["program"])))


async def cancel_program(request: web.Request) -> web.Response:
    """DELETE: end the program's running agents and forget it."""
    program = request.match_info["program"]
    await request.app[SERVICES].programs.cancel(request[TENANT], program)
    return json_reply(request, {"object": "agent.program", "program": program, "deleted": True})


class AgentRequestRun:
    """One agent request under way."""

    def __init__(self, request: web.Request, asked: AgentRequest) -> None:
        self._request = request
        self._asked = asked
        self._seen = Observed(request.app[SERVICES], request[TENANT], TARGET, {asked.agent}, {})
        self._seen.recorded(run_of_agent(TARGET, asked))
        request[TRACE] = self._seen.trace

    async def whole(self) -> web.Response:
        """The answer as one object."""
        answer = await self._run(None)
        body = agent_answer(self._seen.id, self._seen.created, self._asked, answer)
        return json_reply(self._request, body)

    async def streamed(self) -> web.StreamResponse:
        """The answer as typed events."""
        frames = AgentFrames(self._seen.id, self._seen.created, self._asked, self._seen.started_s)
        async with LiveRun(self._run, frames.wants) as run:
            return await stream_run(self._request, run, frames)

    async def _run(self, emit: Emit | None) -> Answer:
        programs = self._request.app[SERVICES].programs
        async with self._request.app[DRAIN].until_cut():
            with self._seen.until_end():
                return await programs.run(self._asked, self._seen.tell(emit))
