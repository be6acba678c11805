"""A chat completion from its body to its reply, whoever asked for it: a client that waits, or a line of a batch."""

import zlib
from dataclasses import dataclass
from typing import Any

from shell_router.api.chat_body import ChatBody, read_chat
from shell_router.api.chat_reply import ChatFrames, StreamOptions, agents, chunk_base, completion
from shell_router.api.drain import Drain
from shell_router.api.fields import Fields
from shell_router.api.observed import Observed
from shell_router.api.recorded import run_of_topology
from shell_router.api.services import Emit, Services
from shell_router.api.settings import ApiSettings
from shell_router.api.targets import Targets
from shell_router.core.generation import UNSEEN_TOKENS
from shell_router.execution import Answer, MoaRequest
from shell_router.topology import Graph


@dataclass(frozen=True, slots=True)
class Chats:
    """Begins chat completions."""

    services: Services
    settings: ApiSettings
    targets: Targets
    drain: Drain

    def begin(self, body: Fields, tenant: str) -> "ChatRun":
        """Check everything that can be checked before anything runs. Raises InvalidRequest."""
        chat = read_chat(body)
        return ChatRun(self, chat, self.targets.choice(chat.models), tenant)


class ChatRun:
    """One completion under way. `id` is its trace's; `streams` says whether it was asked for in chunks."""

    def __init__(self, chats: Chats, chat: ChatBody, topology: Graph, tenant: str) -> None:
        self._chats = chats
        self._chat = chat
        self._topology = topology
        self._seen = Observed(chats.services, tenant, topology.name, topology.answering, topology.waits_for)
        self.id = self._seen.id
        self.trace = self._seen.trace
        self.streams = chat.stream
        self._asked = MoaRequest(
            id=self.id,
            tenant=tenant,
            messages=chat.messages,
            sampling=chat.sampling if chat.stream else {"stream_interval": UNSEEN_TOKENS, **chat.sampling},
            seed=zlib.crc32(self.id.encode()) if chat.seed is None else chat.seed,
            timeout_s=chats.settings.request_timeout_s,
            labels=chat.labels,
        )
        self._seen.recorded(run_of_topology(topology, self._asked))

    async def reply(self) -> dict[str, Any]:
        """Run; the completion as one object."""
        answer = await self.answer(None)
        body = completion(self.id, self._seen.created, self._topology.name, answer)
        if self._chat.include_agents:
            body["agents"] = agents(answer, self._seen.trace)
        return body

    def frames(self) -> ChatFrames:
        """What writes the completion in chunks."""
        return ChatFrames(
            chunk_base(self.id, self._seen.created, self._topology.name),
            self._topology.answering,
            self._seen.started_s,
            self._seen.trace,
            StreamOptions(self._chat.include_usage, self._chat.include_agents),
        )

    async def answer(self, emit: Emit | None) -> Answer:
        """Run; where the server ends first, it ends with RouterStopping."""
        async with self._chats.drain.until_cut():
            with self._seen.until_end():
                executor = self._chats.services.executor
                return await executor.run(self._topology, self._asked, self._seen.tell(emit))
