"""Idempotency-Key: runs that outlive their router, and may be asked for again at any router, or followed on."""

import asyncio
import hashlib
import logging
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import orjson

from agent_cache import CacheUnavailable, JournalDiffers, Journals
from shell_router import errors
from shell_router.api.admission import Drain
from shell_router.api.fields import Fields
from shell_router.api.plain import Request
from shell_router.api.services import Emit
from shell_router.core.events import Event
from shell_router.moa.journal import END, Journal
from shell_router.moa.requests import AgentRequest, Answer, MoaRequest

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
KEY_HEADER = "idempotency-key"
"""As requests' headers are looked up."""
KEY = re.compile(r"[!-~]{1,255}")
LAST_EVENT = "last-event-id"
PLACE = re.compile(r"([0-9]{1,12})-([0-9a-f]{8})")
LONGEST_POLL_S = 1.0


def key_of(request: Request) -> str:
    """The key of a request that has one. Raises InvalidField."""
    key = request.headers[KEY_HEADER]
    if KEY.fullmatch(key):
        return key
    raise _refusal("is not 1 to 255 visible ASCII characters", "Send a random UUID.")


def refuse_key(request: Request, what: str) -> None:
    """Raise InvalidField where a request of this kind, which is not kept, has a key."""
    if KEY_HEADER in request.headers:
        raise _refusal(f"cannot go with {what}", "Leave it out, or send a chat completion that the router runs itself.")


def end_of(record: bytes) -> dict[str, Any] | None:
    """What a journal's last record says of its run's end; None where it has not ended."""
    kind, _, *fields = orjson.loads(record) if record else ("", "")
    return fields[0] if kind == END else None


class Place:
    """How far a stream has come, as the id of its last event says: its characters, and a check of them.

    With `last`, such an id, what its client has already is left out. Raises InvalidField where that is none.
    """

    def __init__(self, last: str | None = None, after: int = 0) -> None:
        self.at, self.after, self._check, self._expected = 0, after, 0, ""
        if last is not None:
            if (found := PLACE.fullmatch(last)) is None:
                raise errors.InvalidField(
                    "The header Last-Event-ID is no id of an event of this router's.",
                    field="Last-Event-ID",
                    remedy="Send the last event's id as it came, or leave it out for all of the stream.",
                )
            self.after, self._expected = int(found[1]), found[2]

    @property
    def id(self) -> bytes:
        """The field of the event that ends here."""
        return b"id: %d-%08x\n" % (self.at, self._check)

    def rest(self, text: str) -> tuple[str, str]:
        """Go on by `text`: what of it the client has, and what not. Raises StreamChanged."""
        left = max(0, self.after - self.at)
        had, rest = text[:left], text[left:]
        if had:
            self._pass(had)
            if self.at == self.after and self._expected not in ("", f"{self._check:08x}"):
                raise _changed()
        self._pass(rest)
        return had, rest

    def require_reached(self) -> None:
        """Raise StreamChanged where the stream ends before what the client has of it."""
        if self.at < self.after:
            raise _changed()

    def _pass(self, text: str) -> None:
        self.at, self._check = self.at + len(text), zlib.crc32(text.encode(errors="replace"), self._check)


def place_of(request: Request) -> Place | None:
    """Where the stream of a kept run begins; None where the run is not kept. Raises InvalidField."""
    return Place(request.headers.get(LAST_EVENT)) if KEY_HEADER in request.headers else None


class Keepable(Protocol):
    """A run that may be kept: `answer` then follows `kept`, which calls `run`."""

    kept: "KeptRun | None"

    @property
    def id(self) -> str: ...

    @property
    def asked(self) -> Any:
        """A MoaRequest or an AgentRequest."""

    async def run(self, asked: Any, also: Emit | None) -> Answer:
        """Run as `asked`; `also` gets the events."""
        ...


W = TypeVar("W", bound=Keepable)


class KeptRuns(Generic[W]):
    """The runs under a key at this router. `store` is None where the deployment shares no cache."""

    def __init__(self, store: Journals | None, drain: Drain) -> None:
        self.store = store
        self._drain = drain
        self._runs: WeakValueDictionary[tuple[str, str], W] = WeakValueDictionary()

    def join(self, whole: W, key: str, body: Fields, head: str = "") -> W:
        """The run that goes on under this key, or else `whole`; its journal begins with `head`, or what stands for
        `body`. Raises InvalidField and KeyReused."""
        if self.store is None:
            raise _refusal("needs a store that outlives the router", "Set cache.backend to redis, or leave it out.")
        named, head = (whole.asked.tenant, key), head or _fingerprint(body)
        found = self._runs.get(named)
        if found is None or found.kept is None or not found.kept.is_open:
            asked = whole.asked
            if isinstance(asked, MoaRequest) and body.raw("seed") is None:
                asked = replace(asked, seed=zlib.crc32(key.encode()))  # draws are the same at every router
            found = self._runs[named] = whole
            whole.kept = KeptRun(asked, whole.id, key, head, self.store, self._drain, whole.run)
        elif found.kept.head != head:
            raise reused()
        return found


class KeptRun:
    """One run under a key. All requests with that key at this router follow it; without any it is cancelled.

    Its journal ends with what a `last_record` says of the answer or error; where there is one, losing the journal ends
    the run.
    """

    def __init__(
        self,
        asked: MoaRequest | AgentRequest,
        run_id: str,
        key: str,
        head: str,
        store: Journals,
        drain: Drain,
        run: Callable[[Any, Emit], Awaitable[Answer]],
    ) -> None:
        self._asked = asked
        self.id = run_id
        self._key = key
        self.head = head
        self._store = store
        self._drain = drain
        self._run: Callable[[Any, Emit], Awaitable[Answer]] | None = run
        self.last_record: Callable[[Answer | Exception], Any] | None = None
        self._events: list[Event] = []
        self._followers: list[Emit] = []
        self._task: asyncio.Task[Answer] | None = None
        self.is_open = True
        """Whether it can be followed."""

    @property
    def has_begun(self) -> bool:
        """Whether a request has followed it."""
        return self._run is None

    async def follow(self, emit: Emit | None) -> Answer:
        """The answer; `emit` gets all events, also those of before."""
        emit = emit or _ignore
        if self._run is not None:
            run, self._run = self._run, None  # what is run refers to this: it would be held until a collection
            self._task = asyncio.create_task(self._kept(run), name="kept-run")
        task = self._task
        assert task is not None, "all of its followers had left"
        for event in self._events:
            emit(event)
        self._followers.append(emit)
        try:
            await asyncio.wait([task])
        finally:
            self._followers.remove(emit)
            if not self._followers:
                await self._left(task)
        if task.cancelled():
            raise errors.ResponseCancelled("The response was cancelled, or another router has gone on with it.")
        return task.result()

    def _lose(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _left(self, task: asyncio.Task[Answer]) -> None:
        """Cancel the run, which nothing follows, unless a request that has joined it is about to."""
        self.is_open = False
        try:
            await asyncio.sleep(0)  # those that have joined it follow by then
        finally:
            self.is_open = bool(self._followers)
            if not self.is_open:
                self._task = None
                self._events.clear()
                task.cancel()
                await asyncio.wait([task])

    def _put(self, event: Event) -> None:
        self._events.append(event)
        for emit in self._followers:
            emit(event)

    async def _kept(self, run: Callable[[Any, Emit], Awaitable[Answer]]) -> Answer:
        journal, ended, last = await self._journal(), False, self.last_record
        self.last_record = None  # it refers to this, too
        if journal is None:
            return await run(self._asked, self._put)
        try:
            answer = await run(replace(self._asked, journal=journal), self._put)
            ended = True
            if last is not None:
                journal.add(END, "", last(answer))
            return answer
        except errors.RouterStopping:
            raise
        except Exception as error:
            if last is not None:
                ended = True
                journal.add(END, "", last(error))
            raise
        finally:
            await journal.close(void=not ended)

    async def _journal(self) -> Journal | None:
        """The run's journal, once no other router runs it; None without a store that can keep it."""
        asked, store, limit_s = self._asked, self._store, self._asked.timeout_s
        try:
            with self._drain.deadline(limit_s):
                records = await self._records()
        except JournalDiffers:
            raise reused() from None
        except CacheUnavailable as error:
            log.warning("run %s is not kept, and would not survive this router: %s", self.id, error)
            return None
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"Another router still runs this request after {limit_s:g} s.", remedy="Ask again with the same key."
            ) from None
        try:
            failed = (end_of(records[-1]) or {}).get("error") if records else None
            journal = Journal(store, asked.tenant, self._key, self.id, records)
        except (LookupError, TypeError, ValueError) as error:
            log.warning("run %s is not kept: its journal makes no sense: %r", self.id, error)
            return None
        if failed:  # meanwhile
            await journal.close(void=False)
            raise errors.ResponseCancelled(failed["message"])
        if self.last_record is not None:
            journal.lost = self._lose
        return journal

    async def _records(self) -> Sequence[bytes]:
        """What is in the journal, once its lease is this run's. Raises CacheUnavailable where the store is away for
        longer than a lease, and no other router was seen to run this: it would go on meanwhile."""
        asked, store, clock = self._asked, self._store, asyncio.get_running_loop().time
        is_run, gives_up_s = False, clock() + self._store.lease_s
        while True:
            try:
                records = await store.claim(asked.tenant, self._key, self.id, self.head)
            except CacheUnavailable:
                if not is_run and clock() >= gives_up_s:
                    raise
            else:
                if records is not None:
                    return records
                is_run = True
            await asyncio.sleep(min(store.lease_s / 4, LONGEST_POLL_S))


def _ignore(_: Event) -> None:
    """Nothing is wanted of the events."""


def _changed() -> errors.StreamChanged:
    return errors.StreamChanged(
        "The repeated stream differs from what came before its Last-Event-ID.",
        remedy="Drop what you have of it, and send the request with its key and without Last-Event-ID.",
    )


def _fingerprint(body: Fields) -> str:
    """What two requests under one key must have in common."""
    found = orjson.dumps(body.as_dict(), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(found, digest_size=16).hexdigest()


def _refusal(what: str, remedy: str) -> errors.InvalidField:
    return errors.InvalidField(f"The header {HEADER} {what}.", field=HEADER, remedy=remedy)


def reused() -> errors.KeyReused:
    return errors.KeyReused(
        f"The {HEADER} was sent before, with another body.",
        remedy="Send the same body again, or a new key for a new request.",
    )
