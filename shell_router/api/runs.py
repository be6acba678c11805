"""A run of a request: its trace, its metrics, and its lines in the trace files.

Under an Idempotency-Key it also has a journal. Then it outlives its router, and clients may ask for
it again at any router, or follow it.
"""

import asyncio
import hashlib
import logging
import re
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import orjson

from agent_cache import CacheUnavailable, JournalDiffers, Journals
from shell_router import errors
from shell_router.api.bodies import as_json
from shell_router.api.services import Services
from shell_router.api.streaming import LAST_EVENT, StreamPosition
from shell_router.core.budget import UNLIMITED, Purse
from shell_router.core.events import AgentTokens, Emit, Event, answer_in
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.spans import CURRENT, SAMPLED
from shell_router.http.app import Key, Request
from shell_router.moa.deadline import Deadline, Deadlines
from shell_router.moa.journal import END, RunJournal
from shell_router.moa.requests import AgentRequest, Answer, MoaRequest
from shell_router.telemetry import FullTrace, RunMetrics, Trace
from shell_router.topology import Graph

if TYPE_CHECKING:
    from shell_router.api import recording

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
KEY_HEADER = "idempotency-key"
"""The name under which requests' headers hold it."""
KEY = re.compile(r"[!-~]{1,255}")
LONGEST_POLL_S = 1.0


def read_key(request: Request) -> str:
    """Return the key of a request that has one. Raises InvalidField."""
    key = request.headers[KEY_HEADER]
    if KEY.fullmatch(key):
        return key
    raise _refusal("is not 1 to 255 visible ASCII characters", "Send a random UUID.")


def require_no_key(request: Request, what: str) -> None:
    """Raise InvalidField if a request of a kind that is not kept has a key."""
    if KEY_HEADER in request.headers:
        raise _refusal(
            f"cannot go with {what}",
            "Leave it out, or send a chat completion that the router runs itself.",
        )


def read_end(record: bytes) -> NewValues | None:
    """Return the end of the run whose journal's last record this is; None if it has not ended."""
    kind, _, *fields = orjson.loads(record) if record else ("", "")
    return fields[0] if kind == END else None


def read_position(request: Request) -> StreamPosition | None:
    """Return where the stream of a kept run begins, None without a key. Raises InvalidField."""
    if KEY_HEADER in request.headers:
        return StreamPosition(request.headers.get(LAST_EVENT))
    return None


class Run:
    """A chat completion, or one agent of a framework's program, under way.

    Attributes:
        id: Its own, and its trace's.
        asked: The request.
        answering: The agents whose tokens are the answer.
        agents: The most agents that run at a time.
        kept: Its journaled form, if it has a key.
    """

    def __init__(
        self,
        services: Services,
        id: str,
        asked: Any,
        graph: Graph | None,
        target: str,
    ) -> None:
        """Prepare the run of `graph`; None for an agent that one model serves.

        If an agent has a graph, events of its answer get the agent's name. Metrics and traces call
        the run `target`.
        """
        self._services = services
        self._graph = graph
        self.asked = asked
        self.id = id
        self.answering = {asked.agent} if graph is None else graph.answering
        self.agents = 1 if graph is None else graph.most_agents
        wall_s = services.wall()
        client = CURRENT.get()
        self.created = int(wall_s)
        kind = FullTrace if services.traces.contents else Trace
        self.trace = kind(
            id,
            tenant=asked.tenant,
            target=target,
            root=min(self.answering, default=""),
            started_s=services.clock(),
            wall_s=wall_s,
            precursors={} if graph is None else graph.waits_for,
            parent=client,
            user=asked.end_user or "",
        )
        if asked.session is not None:
            self.trace.session = asked.session.id
            self.trace.parent_session = asked.session.parent
        if isinstance(asked, AgentRequest):
            self.trace.program = asked.program
            self.trace.agent = "" if asked.chat else asked.agent
        if client is None or client.flags & SAMPLED:
            self._spans = services.spans
        else:
            self._spans = None
        self._metrics = RunMetrics(services.metrics, self.trace, self.answering)
        self._is_topology = target in services.topologies
        self._recording: recording.Recording | None = None
        if services.recorder is not None and (graph is None or isinstance(asked, MoaRequest)):
            from shell_router.api.recording import Recording  # noqa: PLC0415 - most deployments write no traces

            self._recording = Recording(
                services.recorder, asked, graph, self.trace, services.models
            )
        self._also: Emit | None = None
        self.kept: KeptRun | None = None

    def share_budget(self, purse: Purse | None) -> Purse | None:
        """Pay from the purse of the request's other choices; the first one opens and returns it."""
        if self._graph is None or not isinstance(self.asked, MoaRequest):
            return None
        budget = self.asked.budget.tighten(self._graph.budget)
        if budget != UNLIMITED:
            purse = purse or Purse(budget)
            self.asked = replace(self.asked, purse=purse)
        return purse

    def answer(self, also: Emit | None = None) -> Coroutine[Any, Any, Answer]:
        """Run and return the answer; `also` gets the events.

        Raises:
            RouterStopping: The server ended first.
        """
        if self.kept is None:
            return self.run(self.asked, also)
        return self.kept.follow(also)

    async def require_lease(self) -> None:
        """See `RunJournal.require_lease`; without a journal there is nothing to require."""
        if self.kept is not None and self.kept.journal is not None:
            await self.kept.journal.require_lease()

    async def run(self, asked: MoaRequest | AgentRequest, also: Emit | None) -> Answer:
        """Run `asked`, whose seed or journal may differ from the client's request."""
        services = self._services
        self._also = also
        asked = replace(asked, accounts=tuple(services.budgets.list_accounts(asked)))
        outcome = "failed"
        text = ""
        answer = None
        with Deadline(among=services.deadlines):
            services.traces.add(self.trace)
            if self._spans is not None:
                CURRENT.set(self.trace.span)  # engine requests are part of its spans
            try:
                answer = await self._start(asked)
                outcome = "finished"
                return answer
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
                raise
            finally:
                self._close(outcome, text, answer)

    def _start(self, asked: MoaRequest | AgentRequest) -> Awaitable[Answer]:
        services = self._services
        graph = self._graph
        if isinstance(asked, AgentRequest) and graph is None:
            return services.programs.run(asked, self._emit)
        assert graph is not None, "a chat has one"
        if isinstance(asked, MoaRequest):
            return services.executor.run(graph, asked, self._emit)
        also = self._also

        def rename(event: Event) -> None:
            if also is not None and (text := answer_in(event, graph.answering)):
                ids = event.ids if isinstance(event, AgentTokens) else ()
                also(AgentTokens(event.at_s, asked.agent, ids, text))

        self._also = rename
        return services.programs.run_graph(asked, graph, self._emit)

    def _emit(self, event: Event) -> None:
        self.trace.add(event)
        self._metrics.observe(event)
        if self._recording is not None:
            self._recording.observe(event)
        if self._also is not None:
            self._also(event)

    def _close(self, outcome: str, error: str, answer: Answer | None) -> None:
        at_s = self._services.clock()
        self.trace.close(at_s, outcome, error)
        self._services.rates.add(self.trace.tenant, sum(self.trace.usage), at_s)
        self._metrics.close(at_s, outcome)
        for agent in self.trace.agents.values():
            if model := self._services.models.get(agent.model):
                cost = agent.cost(model.price)
                self._services.metrics.cost_dollars.labels(agent.model).inc(cost)
        if self._is_topology and self.trace.target not in self._services.topologies:
            self._services.metrics.drop_target(self.trace.target)  # deleted meanwhile
        if self._recording is not None:
            self._recording.end()
        if self._services.traces.contents and answer is not None:
            self.trace.answer = answer.text
            if isinstance(self.asked, MoaRequest):
                self.trace.question = self.asked.question
        if self._spans is not None:
            self._spans.add(self.trace)


class KeptRuns:
    """The runs under keys at this router; `store` is None if the deployment shares no cache."""

    def __init__(self, store: Journals | None, deadlines: Deadlines) -> None:
        self.store = store
        self._deadlines = deadlines
        self._runs: WeakValueDictionary[tuple[type, str, str], Run] = WeakValueDictionary()

    def join(self, run: Run, key: str, sent: Values, head: str = "") -> Run:
        """Return the open run under this key, or else `run`.

        Its journal begins with `head`, or with a fingerprint of the body that was `sent`.

        Raises:
            InvalidField: The deployment has no store for it.
            KeyReused: The key was sent before with another body.
        """
        if self.store is None:
            raise _refusal(
                "needs a store that outlives the router",
                "Set cache.backend to redis, or leave it out.",
            )
        request = run.asked
        address = (type(request), request.tenant, key)
        head = head or _fingerprint(sent)
        open_run = self._runs.get(address)
        if open_run is not None and open_run.kept is not None and open_run.kept.is_open:
            if open_run.kept.head != head:
                raise make_reuse_error()
            return open_run
        if isinstance(request, MoaRequest) and sent.get("seed") is None:
            # draws are the same at every router
            request = replace(request, seed=zlib.crc32(key.encode()))
        self._runs[address] = run
        run.kept = KeptRun(request, run.id, key, head, self.store, self._deadlines, run.run)
        return run


KEPT_RUNS = Key[KeptRuns]("KEPT_RUNS")


class KeptRun:
    """One run under a key, which all requests with that key at this router follow.

    Without followers it is cancelled.

    Attributes:
        last_record: Makes the last record of the journal from the answer or the error. If it is
            set, losing the journal ends the run.
        journal: The open journal.
        is_open: Whether it can be followed.
    """

    def __init__(
        self,
        asked: MoaRequest | AgentRequest,
        run_id: str,
        key: str,
        head: str,
        store: Journals,
        deadlines: Deadlines,
        run: Callable[[Any, Emit], Awaitable[Answer]],
    ) -> None:
        self._asked = asked
        self.id = run_id
        self._key = key
        self.head = head
        self._store = store
        self._deadlines = deadlines
        self._run: Callable[[Any, Emit], Awaitable[Answer]] | None = run
        self.last_record: Callable[[Answer | Exception], Any] | None = None
        self.journal: RunJournal | None = None
        self._events: list[Event] = []
        self._followers: list[Emit] = []
        self._task: asyncio.Task[Answer] | None = None
        self.is_open = True

    @property
    def has_begun(self) -> bool:
        """Whether a request has followed it, or is about to."""
        return self._run is None or self.last_record is not None

    async def follow(self, emit: Emit | None) -> Answer:
        """Return the answer; `emit` gets all events, also earlier ones."""
        emit = emit or _ignore
        if self._run is not None:
            # the run refers to this object, and would wait for the garbage collector
            run = self._run
            self._run = None
            self._task = asyncio.create_task(self._keep(run), name="kept-run")
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
                await self._close(task)
        if task.cancelled():
            if self.journal is not None:
                await self.journal.require_lease()
            raise errors.ResponseCancelled(
                "The response was cancelled, or another router has gone on with it."
            )
        return task.result()

    def _lose(self, journal: RunJournal, *, ends: bool) -> None:
        """End the run if another router has it, or if without its journal it `ends`."""
        if self._task is not None and (ends or journal.is_taken):
            self._task.cancel()

    async def _close(self, task: asyncio.Task[Answer]) -> None:
        """Cancel the run, which nothing follows, unless a joined request is about to."""
        self.is_open = False
        try:
            await asyncio.sleep(0)  # requests that have joined it follow by then
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

    async def _keep(self, run: Callable[[Any, Emit], Awaitable[Answer]]) -> Answer:
        """Run with a journal, and end the journal as the run ended."""
        journal = await self._open_journal()
        ended = False
        last = self.last_record
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

    async def _open_journal(self) -> RunJournal | None:
        """Return the run's journal once no other router runs it, None if no store can keep it."""
        asked = self._asked
        store = self._store
        limit_s = self._asked.timeout_s
        try:
            with Deadline(limit_s, self._deadlines):
                records = await self._claim()
        except JournalDiffers:
            raise make_reuse_error() from None
        except CacheUnavailable as error:
            log.warning("run %s is not kept, and would not survive this router: %s", self.id, error)
            return None
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"Another router still runs this request after {limit_s:g} s.",
                remedy="Ask again with the same key.",
            ) from None
        try:
            end = read_end(records[-1]) if records else None
            failed = end.get("error") if end else None
            journal = RunJournal(store, asked.tenant, self._key, self.id, records)
        except (LookupError, TypeError, ValueError) as error:
            log.warning("run %s is not kept: its journal makes no sense: %r", self.id, error)
            return None
        if failed:  # meanwhile
            await journal.close(void=False)
            raise errors.ResponseCancelled(failed["message"])
        journal.lost = partial(self._lose, journal, ends=self.last_record is not None)
        self.journal = journal
        return journal

    async def _claim(self) -> Sequence[bytes]:
        """Return the journal's records once its lease is this run's.

        Raises:
            CacheUnavailable: The store is away for longer than a lease, and no other router was
                seen to run this, which would go on meanwhile.
        """
        store = self._store
        clock = asyncio.get_running_loop().time
        is_run = False
        gives_up_s = clock() + store.lease_s
        while True:
            try:
                records = await store.claim(self._asked.tenant, self._key, self.id, self.head)
            except CacheUnavailable:
                if not is_run and clock() >= gives_up_s:
                    raise
            else:
                if records is not None:
                    return records
                is_run = True
            await asyncio.sleep(min(store.lease_s / 4, LONGEST_POLL_S))


def _ignore(_: Event) -> None:
    """Take no notice of the event."""


def _fingerprint(sent: Values) -> str:
    """Return what two requests under one key must have in common."""
    return hashlib.blake2b(as_json(sent, orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def _refusal(what: str, remedy: str) -> errors.InvalidField:
    return errors.InvalidField(f"The header {HEADER} {what}.", field=HEADER, remedy=remedy)


def make_reuse_error() -> errors.KeyReused:
    """Return the error for a key that was sent with another body."""
    return errors.KeyReused(
        f"The {HEADER} was sent before, with another body.",
        remedy="Send the same body again, or a new key for a new request.",
    )
