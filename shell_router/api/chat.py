"""POST /v1/chat/completions: a topology, or a single model, answers."""

import zlib

from aiohttp import web

from shell_router.api.bodies import read_body
from shell_router.api.chat_body import ChatBody, ignored_fields, read_chat
from shell_router.api.chat_reply import ChatFrames, StreamOptions, agents, chunk_base, completion
from shell_router.api.drain import DRAIN
from shell_router.api.fields import parse_body
from shell_router.api.live_run import LiveRun
from shell_router.api.observed import Observed
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import SERVICES, SETTINGS, TENANT, Emit
from shell_router.api.streaming import stream_run
from shell_router.api.targets import TARGETS
from shell_router.execution import Answer, MoaRequest
from shell_router.topology import Topology

UNSEEN_TOKENS = 32
"""Tokens per event of an answer that is not streamed on: each event costs, and nobody sees any of them."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Check everything that can be checked, then run."""
    body = parse_body(await read_body(request))
    chat = read_chat(body)
    topology = request.app[TARGETS].find(chat.model)
    note_ignored(request, ignored_fields(body))
    run = ChatRun(request, chat, topology)
    return await (run.streamed() if chat.stream else run.whole())


class ChatRun:
    """One completion under way."""

    def __init__(self, request: web.Request, chat: ChatBody, topology: Topology) -> None:
        precursors = {agent.id: agent.precursors for agent in topology.agents.values()}
        self._request = request
        self._chat = chat
        self._topology = topology
        self._seen = Observed(request, topology.name, topology.root.id, precursors)
        self._asked = MoaRequest(
            id=self._seen.id,
            tenant=request[TENANT],
            messages=chat.messages,
            sampling=chat.sampling if chat.stream else {"stream_interval": UNSEEN_TOKENS, **chat.sampling},
            seed=zlib.crc32(self._seen.id.encode()) if chat.seed is None else chat.seed,
            timeout_s=request.app[SETTINGS].request_timeout_s,
        )

    async def whole(self) -> web.Response:
        """The completion as one object."""
        answer = await self._run(None)
        body = completion(self._seen.id, self._seen.created, self._chat.model, answer)
        if self._chat.include_agents:
            body["agents"] = agents(answer, self._seen.trace)
        return json_reply(self._request, body)

    async def streamed(self) -> web.StreamResponse:
        """The completion in chunks."""
        frames = ChatFrames(
            chunk_base(self._seen.id, self._seen.created, self._chat.model),
            self._topology.root.id,
            self._seen.started_s,
            self._seen.trace,
            StreamOptions(self._chat.include_usage, self._chat.include_agents),
        )
        async with LiveRun(self._run, frames.wants) as run:
            return await stream_run(self._request, run, frames)

    async def _run(self, emit: Emit | None) -> Answer:
        executor = self._request.app[SERVICES].executor
        async with self._request.app[DRAIN].until_cut():
            with self._seen.until_end():
                return await executor.run(self._topology, self._asked, self._seen.tell(emit))
