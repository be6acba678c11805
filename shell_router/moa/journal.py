"""A run that outlives its router: what engines gave it is kept in a journal, and given again to the
next attempt.

Only engines' outputs are kept. All else follows from them, so another attempt runs like the first:
an engine's output that is in the journal is repeated, one that broke off is continued from its
tokens, and only the rest is asked for.
"""

import asyncio
import hashlib
import logging
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import astuple, dataclass, field, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import orjson

from agent_cache import CacheUnavailable, Journals
from shell_router.core.engine import Finish, Generation, Prefilled, ServedModel, Tokens
from shell_router.core.events import Event, ModelChosen
from shell_router.errors import EngineError
from shell_router.topology import AUTO, Topology

log = logging.getLogger(__name__)

RECORDS_PER_WRITE = 256
ORDER_S = 10.0
"""How long a repeated end waits for those that came before it. Only a run that goes another way
waits that long.
"""

END = "end"
"""The kind of the last record of a run whose answer can be asked for."""

CONTINUABLE = frozenset(
    {
        "custom_params",
        "ignore_eos",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "no_stop_trim",
        "sampling_seed",
        "skip_special_tokens",
        "stop_token_ids",
        "stream_interval",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Sampling parameters whose effect does not depend on where an output began; grammars, stops and
penalties do.
"""

_UPDATE = re.compile(r"\.p\d+$")


@dataclass(slots=True)
class Past:
    """What one generation gave before. `pieces` come with the number of ends before them. `end` is
    None where it broke off with its router, "" where the run left it, and an error's message where
    it failed; `at` is the end's number among all ends."""

    digest: str
    pieces: list[tuple[int, Tokens]] = field(default_factory=list)
    end: Finish | str | None = None
    at: int = 0

    @property
    def joined(self) -> "Past":
        """The same with one piece for all between two ends."""
        found: list[tuple[int, Tokens]] = []
        for ends, group in groupby(self.pieces, key=itemgetter(0)):
            parts = [piece for _, piece in group]
            ids = tuple(chain.from_iterable([part.ids for part in parts]))
            logprobs = tuple(chain.from_iterable([part.logprobs for part in parts]))
            found.append((ends, Tokens(ids, "".join([part.text for part in parts]), logprobs)))
        return replace(self, pieces=found)


class Journal:
    """The journal of one attempt, `run_id`, that owns its lease.

    Records are sent together, as soon as those before them have arrived. While the store is away
    they wait, and the run does not. If it is lost, or another attempt has it, `lost` is called, and
    the run may go on without it.
    """

    def __init__(
        self, store: Journals, tenant: str, key: str, run_id: str, records: Sequence[bytes]
    ) -> None:
        self._store: Journals | None = store
        self._named = tenant, key, run_id
        self.run_id = run_id
        self.lost: Callable[[], object] = bool
        self._position = len(records)
        self._waiting: list[bytes] = []
        self._news = asyncio.Event()
        self._sending = asyncio.Lock()
        self._away = False
        self._renew_s = store.lease_s / 3
        self._chosen: dict[str, str] = {}
        self._pasts: dict[str, Past] = {}
        self._ends_left = self._read(records)
        self._end_passed = asyncio.Event()
        self.repeats = bool(self._chosen or self._pasts)
        self._task = asyncio.create_task(self._keep(), name="run-journal")

    def _read(self, records: Sequence[bytes]) -> set[int]:
        """Learn what is there; the numbers of its ends. What a failed run broke off or left is to
        be asked again.
        """
        ends = 0
        for kind, name, *fields in map(orjson.loads, records):
            past = self._pasts.get(name)
            if kind == "begin":
                self._pasts[name] = Past(fields[0])
            elif kind == "models":
                self._chosen |= fields[0]
            elif kind == "void":
                for one in self._pasts.values():
                    if isinstance(one.end, Finish):
                        one.end = one.end
                    else:
                        one.end = None
            elif past is not None and kind == "tokens":
                ids, text, logprobs = fields
                past.pieces.append((ends, Tokens(tuple(ids), text, tuple(logprobs))))
            elif past is not None and kind == "back":
                del past.pieces[fields[0] :]
            elif past is not None:
                past.end = Finish(*fields[0]) if kind == "finish" else fields[0]
                past.at = ends
                ends += 1
        return {past.at for past in self._pasts.values() if past.end is not None}

    # --- what the run asks

    def wrap_engines(self, models: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
        """The same models, whose engines are asked by way of this journal."""
        return {
            alias: replace(model, engine=JournaledEngine(model, self))
            for alias, model in models.items()
        }

    def pin_models(self, topology: Topology) -> Topology:
        """The topology with the models that were chosen for its agents before."""
        undecided = {agent.id for agent in topology.agents.values() if agent.model == AUTO}
        return topology.with_models(
            {agent: self._chosen[agent] for agent in undecided & self._chosen.keys()}
        )

    def find_choice(self, agent: str) -> str | None:
        """The model that was chosen for the agent before."""
        return self._chosen.get(agent)

    def record_choices(self, choices: Sequence[Event]) -> None:
        """Keep the models that were chosen."""
        for choice in choices:
            if isinstance(choice, ModelChosen):
                self.add("models", "", dict.fromkeys(choice.agents, choice.model))

    def name_of(self, rid: str) -> str:
        """What a request is called in every attempt."""
        return rid.replace(self.run_id, "", 1)

    def past(self, name: str) -> Past | None:
        """What the generation gave before."""
        return self._pasts.get(name)

    def begin(self, name: str, digest: str) -> None:
        """A generation begins, or begins again."""
        if (past := self._pasts.pop(name, None)) is not None and past.end is not None:
            self.passed(past.at)
        self.add("begin", name, digest)

    def add(self, kind: str, name: str, *fields: Any) -> None:
        """Keep a record, soon."""
        if self._store is not None:
            self._waiting.append(orjson.dumps([kind, name, *fields]))
            self._news.set()

    # --- the order of repeated ends, on which early exits depend

    async def reached(self, at: int) -> None:
        """Return once all ends before `at` have been repeated; gives the order up where one does
        not come.
        """
        try:
            async with asyncio.timeout(ORDER_S):
                while min(self._ends_left, default=at) < at:
                    await self._end_passed.wait()
        except TimeoutError:
            log.warning(
                "a repeated run goes another way than before: its outputs come in any order"
            )
            self._ends_left.clear()
            self.passed(at)

    def passed(self, at: int) -> None:
        """That end has been repeated, or will not come."""
        self._ends_left.discard(at)
        passed = self._end_passed
        self._end_passed = asyncio.Event()
        passed.set()

    # --- the store

    async def flush(self) -> None:
        """Return when the store has all records so far, or is away."""
        upto = self._position + len(self._waiting)
        async with self._sending:
            while self._position < upto and self._store is not None and not self._away:
                await self._send(self._store)

    async def close(self, *, void: bool) -> None:
        """Send what waits and give the lease up, unless the store is still away: the lease then
        ends by itself.

        `void` is whether the run has failed or was cancelled.
        """
        if void:
            self.add("void", "")
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._waiting:
            await self._attempt()
        if self._store is not None and not self._waiting:
            with suppress(CacheUnavailable):
                await self._store.release(*self._named)

    async def _keep(self) -> None:
        while True:
            if self._away:
                await asyncio.sleep(self._renew_s / 4)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._renew_s):
                        await self._news.wait()
            self._news.clear()
            await self._attempt()

    async def _attempt(self) -> None:
        """Renew the lease and send what waits, even if the store was away the last time."""
        async with self._sending:
            if self._store is not None:
                await self._send(self._store)
        await self.flush()

    async def _send(self, store: Journals) -> None:
        """Send the first records that wait; without any, this renews the lease."""
        records = self._waiting[:RECORDS_PER_WRITE]
        try:
            is_kept = await store.append(*self._named, self._position, records)
        except CacheUnavailable as error:
            if not self._away:
                log.warning(
                    "run %s goes on, and would not survive this router: %s", self.run_id, error
                )
            self._away = True
            return
        self._away = False
        if not is_kept:
            log.warning(
                "run %s is without its journal: it is lost, or another router has it", self.run_id
            )
            self._store = None
            self._waiting.clear()
            self.lost()
        self._position += len(records)
        del self._waiting[: len(records)]


class JournaledEngine:
    """The engine of a model, by way of a run's journal (core.engine.Engine)."""

    def __init__(self, model: ServedModel, journal: Journal) -> None:
        self._model = model
        self._journal = journal

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """Repeat what is in the journal, and ask the engine for the rest. Its end is kept before it
        is given.
        """
        journal = self._journal
        name = self._journal.name_of(request.rid)
        past = self._usable(name, request)
        written = list[int]()
        try:
            for ends, piece in past.pieces:
                await journal.reached(ends)
                written += piece.ids
                yield piece
            if past.end is not None:
                await journal.reached(past.at)
                if isinstance(past.end, Finish):
                    yield past.end
                    return
                if not past.end:
                    journal.passed(past.at)
                    await asyncio.sleep(ORDER_S)  # the run leaves it here, as before
                raise EngineError(
                    past.end or f"The output of {name!r} was left before, and is needed now."
                )
        finally:
            if past.end is not None:
                journal.passed(past.at)
        async with aclosing(self._asked(name, request, written)) as rest:
            async for item in rest:
                yield item

    async def prefill(self, request: Generation) -> Prefilled:
        """An update of a prompt that was complete before is not sent."""
        if self._journal.past(_UPDATE.sub("", self._journal.name_of(request.rid))) is not None:
            return Prefilled(len(request.input_ids), len(request.input_ids))
        return await self._model.engine.prefill(request)

    async def _asked(
        self, name: str, request: Generation, written: Sequence[int]
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """What the engine writes behind `written`."""
        journal: Journal = self._journal
        left: str | None = ""
        try:
            async with aclosing(self._model.engine.generate(_behind(request, written))) as stream:
                async for item in stream:
                    if isinstance(item, Tokens):
                        journal.add("tokens", name, item.ids, item.text, item.logprobs)
                        yield item
                        continue
                    whole = _whole(request, written, item)
                    journal.add("finish", name, astuple(whole))
                    left = None
                    await journal.flush()
                    yield whole
        except EngineError as error:
            left = str(error)
            raise
        finally:
            if left is not None:
                journal.add("left", name, left)

    def _usable(self, name: str, request: Generation) -> Past:
        """What can be repeated. Where that is nothing, or the prompt is another one, the generation
        begins.
        """
        past = self._journal.past(name)
        digest = _digest(self._model.alias, request.input_ids)
        if past is not None and past.digest == digest:
            if past.end is not None:
                return past.joined
            if kept := self._continuable(request, past):
                self._journal.add("back", name, kept)
                return replace(past, pieces=past.pieces[:kept]).joined
        self._journal.begin(name, digest)
        return Past(digest)

    def _continuable(self, request: Generation, past: Past) -> int:
        """The pieces behind which the engine can go on: the last one's text must be all that its
        ids say, as an engine holds a character back until it is whole."""
        sampling = request.sampling
        given = {name for name, asked in sampling.items() if asked is not None}
        custom = sampling.get("custom_params") or {}
        written = sum(len(piece.ids) for _, piece in past.pieces)
        if not given <= CONTINUABLE or custom.keys() - {"drafts"}:
            return 0
        for kept in range(len(past.pieces), 0, -1):
            piece = past.pieces[kept - 1][1]
            if written < sampling["max_new_tokens"] and self._model.tokenizer.encode(
                piece.text
            ) == list(piece.ids):
                return kept
            written -= len(piece.ids)
        return 0


def _behind(request: Generation, written: Sequence[int]) -> Generation:
    """The request for what follows `written`."""
    if not written:
        return request
    sampling = dict(request.sampling)
    for limit in ("max_new_tokens", "min_new_tokens"):
        if sampling.get(limit):
            sampling[limit] = max(0, sampling[limit] - len(written))
    return replace(request, input_ids=[*request.input_ids, *written], sampling=sampling)


def _whole(request: Generation, written: Sequence[int], rest: Finish) -> Finish:
    """The end of an output that began with `written`."""
    prompt = len(request.input_ids)
    tokens = len(written) + rest.completion_tokens
    cached = min(rest.cached_tokens, prompt)
    if written:
        return replace(rest, prompt_tokens=prompt, completion_tokens=tokens, cached_tokens=cached)
    return rest


def _digest(model: str, ids: Sequence[int]) -> str:
    return hashlib.blake2b(
        array("I", ids).tobytes(), key=model.encode()[:64], digest_size=16
    ).hexdigest()
