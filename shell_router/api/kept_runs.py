"""Idempotency-Key: chat completions that outlive their router, and may be asked for again at any router."""

import asyncio
import hashlib
import logging
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import orjson

from agent_cache import CacheUnavailable, JournalDiffers, Journals
from shell_router.api.admission import Drain
from shell_router.api.fields import Fields
from shell_router.api.plain import Request
from shell_router.api.services import Emit
from shell_router.core.events import Event
from shell_router.errors import DeadlineExceeded, InvalidField, KeyReused
from shell_router.moa import Answer, Journal, MoaRequest

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
KEY_HEADER = "idempotency-key"
"""As requests' headers are looked up."""
KEY = re.compile(r"[!-~]{1,255}")
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


class Keepable(Protocol):
    """A run that may be kept: `answer` then follows `kept`, which calls `run`."""

    kept: "KeptRun | None"

    @property
    def asked(self) -> MoaRequest: ...

    async def run(self, asked: MoaRequest, also: Emit | None) -> Answer:
        """Run as `asked`; `also` gets the events."""
        ...


W = TypeVar("W", bound=Keepable)


class KeptRuns(Generic[W]):
    """The runs under a key at this router. `store` is None where the deployment shares no cache."""

    def __init__(self, store: Journals | None, drain: Drain) -> None:
        self._store = store
        self._drain = drain
        self._runs: WeakValueDictionary[tuple[str, str], W] = WeakValueDictionary()

    def join(self, whole: W, key: str, body: Fields) -> W:
        """The run that goes on under this key, or else `whole`. Raises InvalidField and KeyReused."""
        if self._store is None:
            raise _refusal("needs a store that outlives the router", "Set cache.backend to redis, or leave it out.")
        named, fingerprint = (whole.asked.tenant, key), _fingerprint(body)
        found = self._runs.get(named)
        if found is None or found.kept is None or not found.kept.is_open:
            asked = whole.asked
            if body.raw("seed") is None:
                asked = replace(asked, seed=zlib.crc32(key.encode()))  # draws are the same at every router
            found = self._runs[named] = whole
            whole.kept = KeptRun(asked, key, fingerprint, self._store, self._drain, whole.run)
        elif found.kept.fingerprint != fingerprint:
            raise _reused()
        return found


class KeptRun:
    """One run under a key. All requests with that key at this router follow it; without any it is cancelled."""

    def __init__(
        self,
        asked: MoaRequest,
        key: str,
        fingerprint: str,
        store: Journals,
        drain: Drain,
        run: Callable[[MoaRequest, Emit], Awaitable[Answer]],
    ) -> None:
        self._asked = asked
        self._key = key
        self.fingerprint = fingerprint
        self._store = store
        self._drain = drain
        self._run: Callable[[MoaRequest, Emit], Awaitable[Answer]] | None = run
        self._events: list[Event] = []
        self._followers: list[Emit] = []
        self._task: asyncio.Task[Answer] | None = None
        self.is_open = True
        """Whether it can be followed."""

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
        return task.result()

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

    async def _kept(self, run: Callable[[MoaRequest, Emit], Awaitable[Answer]]) -> Answer:
        journal, has_answer = await self._journal(), False
        if journal is None:
            return await run(self._asked, self._put)
        try:
            answer = await run(replace(self._asked, journal=journal), self._put)
            has_answer = True
            return answer
        finally:
            await journal.close(void=not has_answer)

    async def _journal(self) -> Journal | None:
        """The run's journal, once no other router runs it; None without a store that can keep it."""
        asked, store, limit_s = self._asked, self._store, self._asked.timeout_s
        try:
            with self._drain.deadline(limit_s):
                records = await self._records()
        except JournalDiffers:
            raise _reused() from None
        except CacheUnavailable as error:
            log.warning("run %s is not kept, and would not survive this router: %s", asked.id, error)
            return None
        except TimeoutError:
            raise DeadlineExceeded(
                f"Another router still runs this request after {limit_s:g} s.", remedy="Ask again with the same key."
            ) from None
        try:
            return Journal(store, asked.tenant, self._key, asked.id, records)
        except (LookupError, TypeError, ValueError) as error:
            log.warning("run %s is not kept: its journal makes no sense: %r", asked.id, error)
            return None

    async def _records(self) -> Sequence[bytes]:
        """What is in the journal, once its lease is this run's. Raises CacheUnavailable where the store is away for
        longer than a lease, and no other router was seen to run this: it would go on meanwhile."""
        asked, store, clock = self._asked, self._store, asyncio.get_running_loop().time
        is_run, gives_up_s = False, clock() + self._store.lease_s
        while True:
            try:
                records = await store.claim(asked.tenant, self._key, asked.id, self.fingerprint)
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


def _fingerprint(body: Fields) -> str:
    """What two requests under one key must have in common."""
    found = orjson.dumps(body.as_dict(), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(found, digest_size=16).hexdigest()


def _refusal(what: str, remedy: str) -> InvalidField:
    return InvalidField(f"The header {HEADER} {what}.", field=HEADER, remedy=remedy)


def _reused() -> KeyReused:
    return KeyReused(
        f"The {HEADER} was sent before, with another body.",
        remedy="Send the same body again, or a new key for a new request.",
    )
