"""Keeps what a turn's agents have given, for the requests that bring the results of calls."""

import asyncio
import hashlib
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

import orjson
from pydantic import TypeAdapter

from agent_cache import AgentPromptCache, Chunk, End, LogExists, LogKey, LogTimeout
from shell_router.moa.agent_calls import check_results, end_stage, find_issued, find_next_stage
from shell_router.moa.requests import FanOut, MoaRequest, Turn
from shell_router.topology import Graph

ARRIVAL_S = 0.1
"""The time in which another router's outputs reach Redis."""

_FAN_OUT = TypeAdapter(FanOut)


class Turns:
    """The turns whose outputs lie in the agent cache, where any router finds them.

    Requests of one turn that run here at once share their outputs, too. The oldest turns are
    forgotten beyond `most_characters`.
    """

    def __init__(self, cache: AgentPromptCache, most_characters: int = 2**26) -> None:
        self._cache = cache
        self._most_characters = most_characters
        self._locks: WeakValueDictionary[LogKey, asyncio.Lock] = WeakValueDictionary()
        self._kept: OrderedDict[LogKey, int] = OrderedDict()
        self._characters = 0

    @asynccontextmanager
    async def open(self, graph: Graph, request: MoaRequest) -> AsyncIterator[Turn]:
        """Yield the request's turn, and keep what it has `read`."""
        messages = request.turn_messages
        turn = Turn(graph.keeps_proposals and len(messages) < len(request.messages))
        if turn.continues or request.offer is not None:
            question = repr((graph, messages)).encode()
            turn.name = hashlib.blake2b(question, digest_size=16).hexdigest()
        if not turn.name or not graph.keeps_proposals:
            yield turn
            return
        ids, stage = find_issued(graph, request)
        key = _make_key(request, turn, stage)
        lock = asyncio.Lock()
        if turn.continues:
            lock = self._locks.setdefault(key, lock)
        async with lock:
            if turn.continues:
                with suppress(LogTimeout, ValueError):
                    turn.kept = _FAN_OUT.validate_json(await self._find(key, request))
                if ids:
                    check_results(turn.kept, ids, request)
            if not turn.kept.reader:
                yield turn
                if turn.read is not None:
                    # a router reads its own outputs again, so that no stage replaces another's
                    stage = end_stage(stage)
                    if not turn.read.reader:
                        stage = find_next_stage(turn.read.issued)
                    key = _make_key(request, turn, stage)
                    await self._keep(key, orjson.dumps(turn.read).decode())
                return
        yield turn

    async def _find(self, key: LogKey, request: MoaRequest) -> str:
        """Return what is kept; empty if an earlier attempt found nothing. Raises LogTimeout."""
        journal = request.journal
        if journal is not None and journal.repeats:
            return journal.kept.get(journal.name_request(request.id), "")
        read = await self._cache.read(key, at_least=sys.maxsize, wait_s=ARRIVAL_S)
        if journal is not None:
            journal.add("kept", journal.name_request(request.id), read.text)
        return read.text

    async def _keep(self, key: LogKey, text: str) -> None:
        """Put the text in the place of an earlier one."""
        await self._cache.forget(key.tenant, key.program)
        with suppress(LogExists):  # another router keeps its own now
            writer = await self._cache.create(key)
            writer.append(Chunk(text))
            writer.end(End.FINISHED)
            await self._cache.flush(limit_s=ARRIVAL_S)  # once answered, this router may die
        self._characters += len(text) - self._kept.pop(key, 0)
        self._kept[key] = len(text)
        while self._characters > self._most_characters:
            oldest, characters = self._kept.popitem(last=False)
            self._characters -= characters
            await self._cache.forget(oldest.tenant, oldest.program)


def _make_key(request: MoaRequest, turn: Turn, stage: str) -> LogKey:
    """Return the place of a turn's outputs at this stage."""
    return LogKey(request.tenant, f"turn/{turn.name}{stage}", "root")
