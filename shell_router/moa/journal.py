"""Journals of runs that outlive their router: what engines gave a run is given to its next attempt.

Only engines' outputs are recorded. All else follows from them, so another attempt runs like the
first: a recorded output is repeated, one that broke off is continued from its tokens, and only the
rest is requested.
"""

import asyncio
import hashlib
import logging
import math
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import astuple, dataclass, field, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import orjson

from agent_cache import CacheUnavailable, Journals, JournalTaken
from shell_router.core.engine import Finish, Generation, Prefilled, ServedModel, Tokens
from shell_router.core.events import Event, ModelChosen
from shell_router.errors import EngineError, PromptTooLong, ResponseCancelled
from shell_router.topology import AUTO, Topology

log = logging.getLogger(__name__)

RECORDS_PER_WRITE = 256
ORDER_S = 10.0
"""The longest wait of a repeated end for earlier ones; a run that goes another way takes it."""

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
"""Sampling parameters whose effect does not depend on where an output began; that of grammars,
stops and penalties does.
"""

_UPDATE = re.compile(r"\.p\d+$")


@dataclass(slots=True)
class RecordedGeneration:
    """The records of one generation.

    Attributes:
        digest: Of the model and the prompt.
        pieces: The tokens, each with the number of ends recorded before it.
        end: None if the generation broke off with its router, "" if the run left it, the message of
            its error if it failed.
        end_number: The number of its end among all ends.
    """

    digest: str
    pieces: list[tuple[int, Tokens]] = field(default_factory=list)
    end: Finish | str | None = None
    end_number: int = 0

    def join_pieces(self) -> "RecordedGeneration":
        """Return the same with one piece for all tokens between two ends."""
        joined: list[tuple[int, Tokens]] = []
        for ends, group in groupby(self.pieces, key=itemgetter(0)):
            pieces = [piece for _, piece in group]
            ids = tuple(chain.from_iterable([piece.ids for piece in pieces]))
            logprobs = tuple(chain.from_iterable([piece.logprobs for piece in pieces]))
            text = "".join([piece.text for piece in pieces])
            joined.append((ends, Tokens(ids, text, logprobs)))
        return replace(self, pieces=joined)


class RunJournal:
    """The journal of one attempt at a run; the attempt owns its lease.

    Records are sent together, as soon as those before them have arrived. While the store is away
    they wait, and the run does not. If the journal is lost, or another attempt has it, `lost` is
    called. The run may go on without a journal that is lost. With one that `is_taken` it must not:
    its clients could read another text than the other attempt's.

    Attributes:
        run_id: The attempt.
        chosen: The model that an earlier attempt chose for each agent.
        kept: The outputs of its turn that an earlier attempt found, by the name of the request.
        recorded: What engines gave to earlier attempts, by the names of requests.
        repeats: Whether there was an earlier attempt.
    """

    def __init__(
        self, store: Journals, tenant: str, key: str, run_id: str, records: Sequence[bytes]
    ) -> None:
        self.run_id = run_id
        self.lost: Callable[[], object] = bool
        self.is_taken = False
        self._leased_until_s = -math.inf  # until the first write: the claim's time is not known
        self._store: Journals | None = store
        self._address = tenant, key, run_id
        self._position = len(records)
        self._waiting: list[bytes] = []
        self._news = asyncio.Event()
        self._sending = asyncio.Lock()
        self._away = False
        self._renew_s = store.lease_s / 3
        self.chosen: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.recorded: dict[str, RecordedGeneration] = {}
        self._ends_left = self._replay(records)
        self._end_passed = asyncio.Event()
        self.repeats = bool(self.chosen or self.recorded)
        self._task = asyncio.create_task(self._keep(), name="run-journal")

    def _replay(self, records: Sequence[bytes]) -> set[int]:
        """Read the records and return the numbers of all ends.

        Generations that a failed attempt broke off or left are requested again.
        """
        ends = 0
        for kind, name, *fields in map(orjson.loads, records):
            recorded = self.recorded.get(name)
            if kind == "begin":
                self.recorded[name] = RecordedGeneration(fields[0])
            elif kind == "models":
                self.chosen |= fields[0]
            elif kind == "kept":
                self.kept[name] = fields[0]
            elif kind == "void":
                for generation in self.recorded.values():
                    if not isinstance(generation.end, Finish):
                        generation.end = None
            elif recorded is None:
                continue
            elif kind == "tokens":
                ids, text, logprobs = fields
                recorded.pieces.append((ends, Tokens(tuple(ids), text, tuple(logprobs))))
            elif kind == "back":
                del recorded.pieces[fields[0] :]
            else:
                recorded.end = Finish(*fields[0]) if kind == "finish" else fields[0]
                recorded.end_number = ends
                ends += 1
        return {
            recorded.end_number for recorded in self.recorded.values() if recorded.end is not None
        }

    # --- for the run

    def wrap_engines(self, models: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
        """Return the models with engines that go through this journal."""
        return {
            alias: replace(model, engine=JournaledEngine(model, self))
            for alias, model in models.items()
        }

    def pin_models(self, topology: Topology) -> Topology:
        """Return the topology with the models that an earlier attempt chose."""
        undecided = {agent.id for agent in topology.agents.values() if agent.model == AUTO}
        chosen = {agent: model for agent, model in self.chosen.items() if agent in undecided}
        return topology.with_models(chosen)

    def record_choices(self, choices: Sequence[Event]) -> None:
        """Record the models that were chosen."""
        for choice in choices:
            if isinstance(choice, ModelChosen):
                self.add("models", "", dict.fromkeys(choice.agents, choice.model))

    def name_request(self, rid: str) -> str:
        """Return the name of a request, which is the same in every attempt."""
        return rid.replace(self.run_id, "", 1)

    def count_recorded(self, rid: str, model: str, ids: Sequence[int]) -> float | None:
        """Count an output's recorded tokens, inf if it ended; None if this prompt never began."""
        recorded = self.recorded.get(self.name_request(rid))
        if recorded is None or recorded.digest != _compute_digest(model, ids):
            return None
        if recorded.end is not None:
            return math.inf
        return sum(len(piece.ids) for _, piece in recorded.pieces)

    def begin(self, name: str, digest: str) -> None:
        """Record that a generation begins, or begins again."""
        recorded = self.recorded.pop(name, None)
        if recorded is not None and recorded.end is not None:
            self.pass_end(recorded.end_number)
        self.add("begin", name, digest)

    def add(self, kind: str, name: str, *fields: Any) -> None:
        """Add a record, which is sent soon."""
        if self._store is not None:
            self._waiting.append(orjson.dumps([kind, name, *fields]))
            self._news.set()

    # --- the order of repeated ends, on which early exits depend

    async def await_ends(self, number: int) -> None:
        """Return once all ends before `number` were repeated; give the order up if one is late."""
        try:
            async with asyncio.timeout(ORDER_S):
                while min(self._ends_left, default=number) < number:
                    await self._end_passed.wait()
        except TimeoutError:
            log.warning(
                "a repeated run goes another way than before: its outputs come in any order"
            )
            self._ends_left.clear()
            self.pass_end(number)

    def pass_end(self, number: int) -> None:
        """Note that an end was repeated, or will not come."""
        self._ends_left.discard(number)
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

    async def require_lease(self) -> None:
        """Return if no other router can have gone on with the run; before each write to a client.

        The store is asked only if the lease has run out, as after a freeze of this process. While
        it is away the run goes on.

        Raises:
            ResponseCancelled: Another router has the run.
        """
        store = self._store
        if store is not None and not self._away and store.read_clock() >= self._leased_until_s:
            await self._attempt()
        if self.is_taken:
            raise ResponseCancelled(
                "Another router has gone on with this request, as this one was silent for longer "
                "than cache.lease_s.",
                remedy="Drop this text, and send the request again with the same key.",
            )

    async def close(self, *, void: bool) -> None:
        """Send the waiting records and release the lease; a store still away lets it expire.

        `void` tells that the run has failed or was cancelled.
        """
        if void:
            self.add("void", "")
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._waiting:
            await self._attempt()
        if self._store is not None and not self._waiting:
            with suppress(CacheUnavailable):
                await self._store.release(*self._address)
        self._store = None
        self.lost = bool  # it may refer to what refers to this

    async def _keep(self) -> None:
        """Send records as they come, and renew the lease."""
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
        """Renew the lease and send the waiting records, even if the store was away before."""
        async with self._sending:
            if self._store is not None:
                await self._send(self._store)
        await self.flush()

    async def _send(self, store: Journals) -> None:
        """Send the first waiting records; without any, this renews the lease."""
        records = self._waiting[:RECORDS_PER_WRITE]
        sent_s = store.read_clock()
        is_owned = False
        try:
            is_owned = await store.append(*self._address, self._position, records)
        except JournalTaken:
            self.is_taken = True
        except CacheUnavailable as error:
            if not self._away:
                log.warning(
                    "run %s goes on, and would not survive this router: %s", self.run_id, error
                )
            self._away = True
            return
        self._away = False
        self._leased_until_s = sent_s + store.lease_s
        if not is_owned:
            what = "ends: another router has it" if self.is_taken else "has lost its journal"
            log.warning("run %s %s", self.run_id, what)
            self._store = None
            self._waiting.clear()
            self.lost()
        self._position += len(records)
        del self._waiting[: len(records)]


class OutputLeft(EngineError):
    """An earlier attempt cut this output off, and this attempt has not."""


class JournaledEngine:
    """The engine of a model behind a run's journal (core.engine.Engine)."""

    def __init__(self, model: ServedModel, journal: RunJournal) -> None:
        self._model = model
        self._journal = journal

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """Repeat the recorded tokens, and request the rest, whose end is recorded at once."""
        journal = self._journal
        name = journal.name_request(request.rid)
        recorded = self._take_recorded(name, request)
        end = recorded.end
        written = list[int]()
        try:
            for ends, piece in recorded.pieces:
                await journal.await_ends(ends)
                written += piece.ids
                yield piece
            if end is not None:
                await journal.await_ends(recorded.end_number)
            if isinstance(end, Finish):
                yield end
                return
            if end == "":
                journal.pass_end(recorded.end_number)
                await asyncio.sleep(ORDER_S)  # the run leaves it here, as before
                raise OutputLeft(f"The output of {name!r} was left before, and is needed now.")
            if end is not None:
                raise EngineError(end)
        finally:
            if end is not None:
                journal.pass_end(recorded.end_number)
        async with aclosing(self._generate_rest(name, request, written)) as rest:
            async for item in rest:
                yield item

    async def prefill(self, request: Generation) -> Prefilled:
        """Prefill, unless an earlier attempt had the complete prompt."""
        name = _UPDATE.sub("", self._journal.name_request(request.rid))
        if self._journal.recorded.get(name) is not None:
            return Prefilled(len(request.input_ids), len(request.input_ids))
        return await self._model.engine.prefill(request)

    async def _generate_rest(
        self, name: str, request: Generation, written: Sequence[int]
    ) -> AsyncGenerator[Tokens | Finish, None]:
        """Request and record all tokens after `written`."""
        journal = self._journal
        left: str | None = ""
        rest = skip_written(request, written)
        try:
            async with aclosing(self._model.engine.generate(rest)) as stream:
                async for item in stream:
                    if isinstance(item, Tokens):
                        journal.add("tokens", name, item.ids, item.text, item.logprobs)
                        yield item
                        continue
                    finish = count_written(request, written, item)
                    journal.add("finish", name, astuple(finish))
                    left = None
                    await journal.flush()
                    yield finish
        except EngineError as error:
            left = str(error)
            raise
        except PromptTooLong:
            left = None  # it is soon refused again
            raise
        finally:
            if left is not None:
                journal.add("left", name, left)

    def _take_recorded(self, name: str, request: Generation) -> RecordedGeneration:
        """Return what can be repeated; if that is nothing, the generation begins."""
        recorded = self._journal.recorded.get(name)
        digest = _compute_digest(self._model.alias, request.input_ids)
        if recorded is not None and recorded.digest == digest:
            if recorded.end is not None:
                return recorded.join_pieces()
            if count := self._count_continuable(request, recorded):
                self._journal.add("back", name, count)
                return replace(recorded, pieces=recorded.pieces[:count]).join_pieces()
        self._journal.begin(name, digest)
        return RecordedGeneration(digest)

    def _count_continuable(self, request: Generation, recorded: RecordedGeneration) -> int:
        """Return the number of pieces after which the engine can go on."""
        if not can_continue(self._model, request):
            return 0
        pieces = [piece for _, piece in recorded.pieces]
        written = sum(len(piece.ids) for piece in pieces)
        for count in range(len(pieces), 0, -1):
            piece = pieces[count - 1]
            if written < request.sampling["max_new_tokens"] and is_whole(self._model, piece):
                return count
            written -= len(piece.ids)
        return 0


def can_continue(model: ServedModel, request: Generation) -> bool:
    """Tell whether the model's engine can go on with an output of the request."""
    names = {name for name, value in request.sampling.items() if value is not None}
    custom = request.sampling.get("custom_params") or {}
    is_free = names <= CONTINUABLE and not custom.keys() - {"drafts"}
    return is_free and not model.takes_messages


def is_whole(model: ServedModel, piece: Tokens) -> bool:
    """Tell whether the piece's text is all that its ids spell.

    An engine holds a character back until it is complete, and cannot go on within one.
    """
    return model.tokenizer.encode(piece.text) == list(piece.ids)


def skip_written(request: Generation, written: Sequence[int]) -> Generation:
    """Return the request for the tokens after `written`."""
    if not written:
        return request
    sampling = dict(request.sampling)
    for limit in ("max_new_tokens", "min_new_tokens"):
        if sampling.get(limit):
            sampling[limit] = max(0, sampling[limit] - len(written))
    return replace(request, input_ids=[*request.input_ids, *written], sampling=sampling)


def count_written(request: Generation, written: Sequence[int], rest: Finish) -> Finish:
    """Return the end of an output that began with `written`."""
    if not written:
        return rest
    prompt_tokens = len(request.input_ids)
    return replace(
        rest,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(written) + rest.completion_tokens,
        cached_tokens=min(rest.cached_tokens, prompt_tokens),
    )


def _compute_digest(model: str, ids: Sequence[int]) -> str:
    key = model.encode()[:64]
    return hashlib.blake2b(array("I", ids).tobytes(), key=key, digest_size=16).hexdigest()
