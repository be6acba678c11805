"""LoRA adapters on a model's servers: leases for requests, and the loads that they need; likewise
whole models.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import orjson

from shell_router.core.durations import Durations
from shell_router.engines.server_client import NOT_FOUND, ServerClient
from shell_router.engines.wire import broken_wire
from shell_router.errors import (
    AdapterFailed,
    AdapterMissing,
    EngineError,
    EngineRejected,
    EngineUnavailable,
)
from shell_router.http.tasks import TaskOwner
from shell_router.routing.adapter_cache import (
    AdapterCache,
    AdapterSettings,
    Group,
    LoadedAdapter,
    Order,
    least_recently_used,
)
from shell_router.routing.failures import INTERNAL_ERROR

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lease:
    """The adapter stays on its server from now until `close`, which must be called; calling it
    again changes nothing.

    It was waited for `waited_s`.
    """

    leases: "AdapterLeases"
    at: LoadedAdapter
    waited_s: float
    is_open: bool = True

    async def missing(self) -> None:
        """The server says that it does not have the adapter: it is to be loaded again."""
        await self.leases.lost(self.at)

    def close(self) -> None:
        """The request needs it no longer."""
        if self.is_open:
            self.is_open = False
            self.leases.left(self.at)


@dataclass(slots=True)
class AdapterCounts:
    """What has happened on one server: loads of adapters, waits of requests for theirs, loads that
    failed, and adapters that were missing although they had been loaded."""

    loads: Durations = field(default_factory=Durations)
    waits: Durations = field(default_factory=Durations)
    failures: int = 0
    missing: int = 0


class Loader(Protocol):
    """Loads and unloads adapters on one server, one at a time."""

    async def load(self, adapter: str) -> None:
        """A load that raises, or is cancelled, leaves nothing behind."""
        ...

    async def unload(self, adapter: str) -> None:
        """What this raises is logged; the adapter then counts as gone."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    lease: "asyncio.Future[Lease]"
    arrived_s: float


class AdapterLeases:
    """Gives leases on the adapters of one server, and has them loaded so that all get theirs.

    Any number of requests may hold the same adapter. It stays while one of them does. `server`
    names it in words, and `kind` what is loaded; `clock` gives monotonic seconds. `failing` says
    that the server itself failed at its last load.
    """

    def __init__(
        self,
        server: str,
        loader: Loader,
        settings: AdapterSettings,
        tasks: TaskOwner,
        clock: Callable[[], float],
        *,
        kind: str = "adapter",
        order: Order = least_recently_used,
    ) -> None:
        self.counts = AdapterCounts()
        self.failing = False
        self._server = server
        self._kind = kind
        self._loader = loader
        self._wait_s = settings.wait_s
        self._tasks = tasks
        self._clock = clock
        self._cache: AdapterCache[_Waiter] = AdapterCache(settings, order)
        self._lock = asyncio.Lock()
        self._at_work = False

    @property
    def loaded(self) -> tuple[str, ...]:
        """The adapters that are loaded."""
        return tuple(self._cache.loaded)

    @property
    def waiting(self) -> int:
        """Requests that wait for theirs."""
        return sum(len(group.waiters) for group in self._cache.groups)

    def will_have(self, adapter: str) -> bool:
        """Whether it is loaded, being loaded, or awaited here."""
        return self._cache.is_coming(adapter) or any(
            group.adapter == adapter for group in self._cache.groups
        )

    def serves(self, adapter: str) -> bool:
        """Whether a request would get it without waiting."""
        return self._cache.serves(adapter)

    async def lease(self, adapter: str) -> Lease:
        """The adapter, loaded, until the lease is closed.

        Raises AdapterFailed where it does not load, EngineError where the server fails,
        EngineUnavailable where no place for it comes free within `wait_s`, or it is still being
        loaded then.
        """
        self._cache.drain(self._clock())
        if self._cache.serves(adapter):
            return Lease(self, self._cache.pin(adapter), 0.0)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), self._clock())
        self._cache.wait(adapter, waiter, waiter.arrived_s)
        self._advance()
        try:
            async with asyncio.timeout(self._wait_s):
                return await waiter.lease
        except BaseException as error:
            if self._cache.leave(waiter):
                self._advance()
            elif (
                waiter.lease.done()
                and not waiter.lease.cancelled()
                and waiter.lease.exception() is None
            ):
                waiter.lease.result().close()  # it came in this very moment
            if not isinstance(error, TimeoutError):
                raise
            raise self._too_late(adapter) from error

    def load_ahead(self, adapter: str, *, evicting: bool = False) -> None:
        """A request is about to want it: load it now if a place is free.

        With `evicting` also in the place of one that none awaits, unless others wait, who may need
        that place.
        """
        if not self.will_have(adapter) and not (evicting and self.waiting):
            self._cache.load_ahead(adapter, evicting=evicting)
            self._advance()

    # --- for leases

    def left(self, at: LoadedAdapter) -> None:
        """A lease on this load of an adapter was closed."""
        at.pins -= 1
        self._advance()

    async def lost(self, at: LoadedAdapter) -> None:
        """The server does not have this load of an adapter."""
        async with self._lock:
            if self._cache.loaded.get(at.name) is at:
                self.counts.missing += 1
                log.warning(
                    "the %s has lost the %s %r: it is loaded again",
                    self._server,
                    self._kind,
                    at.name,
                )
                await self._unload(at.name)
        self._advance()

    # --- granting

    def _advance(self) -> None:
        """Something has changed: grant leases, and load what is next."""
        self._grant()
        if not self._at_work and self._cache.next_to_load() is not None:
            self._at_work = True
            self._tasks.start(self._load_all())

    def _grant(self) -> None:
        """Group by group, since an adapter may be drained once those before the others have got
        it."""
        cache = self._cache
        if not cache.groups:
            return
        cache.drain(self._clock())
        while group := next((one for one in cache.groups if cache.serves(one.adapter)), None):
            now_s = self._clock()
            for waiter in self._taken_out([group]):
                waited_s = now_s - waiter.arrived_s
                self.counts.waits.add(waited_s)
                waiter.lease.set_result(Lease(self, cache.pin(group.adapter), waited_s))
            cache.drain(self._clock())

    def _taken_out(self, groups: Collection[Group[_Waiter]]) -> list[_Waiter]:
        """The requests of these groups, which wait no longer, but for those that were given up in
        this very moment.
        """
        self._cache.groups = [one for one in self._cache.groups if one not in groups]
        return [waiter for group in groups for waiter in group.waiters if not waiter.lease.done()]

    def _too_late(self, adapter: str) -> EngineUnavailable:
        if self._cache.is_coming(adapter):
            return EngineUnavailable(
                f"The {self._kind} {adapter!r} was still being loaded after {self._wait_s:g} s.",
                remedy="Look at the engines' load and logs, or raise wait_s.",
            )
        if self._kind == "adapter":
            more = "max_loaded_adapters or more engines"
        else:
            more = "max_loaded_models or pairs"
        return EngineUnavailable(
            f"No place for the {self._kind} {adapter!r} came free within {self._wait_s:g} s.",
            remedy=(
                f"Ask again later, raise wait_s, or allow more {self._kind}s at a time: by {more}."
            ),
        )

    # --- loading

    async def _load_all(self) -> None:
        """Load what is awaited, one after the other, until there is nothing more to load or no
        place for it.

        Where there is no place, the next lease that closes starts this again.
        """
        cache = self._cache
        has_place = True
        try:
            while has_place and (found := cache.next_to_load()) is not None:
                adapter, turn = found
                cache.loading = adapter
                try:
                    has_place = await self._load(adapter, turn)
                except AdapterFailed as error:
                    self._give_up(
                        error, [group for group in cache.groups if group.adapter == adapter]
                    )
                except EngineError as error:  # the server's fault: every request here fails
                    self.failing = True
                    cache.ahead.clear()
                    self._give_up(error, cache.groups)
                except Exception as error:
                    log.exception("%ss of the %s", self._kind, self._server)
                    self._give_up(
                        AdapterFailed(f"{error!r}", remedy="Please report it."), cache.groups
                    )
                finally:
                    cache.loading = None
                    cache.ahead.pop(adapter, None)
                self._grant()
        finally:
            self._at_work = False

    async def _load(self, adapter: str, turn: int) -> bool:
        """False where there is no place."""
        async with self._lock:
            if not await self._make_room(turn):
                return False
            begun_s = self._clock()
            self._cache.taken += 1
            try:
                await self._loader.load(adapter)
            except BaseException:
                self._cache.taken -= 1
                raise
            self._cache.add(adapter)
        took_s = self._clock() - begun_s
        self.failing = False
        self.counts.loads.add(took_s)
        log.info(
            "the %s has the %s %r after %.0f ms", self._server, self._kind, adapter, 1e3 * took_s
        )
        return True

    async def _make_room(self, turn: int) -> bool:
        """Unload until there is a place. False where what may leave is not enough."""
        while (victims := self._cache.victims(turn)) is not None:
            if not victims:
                return True
            await self._unload(victims[0])
        return False

    async def _unload(self, adapter: str) -> None:
        """Unload it, needed or not. One that cannot be unloaded counts as gone, with a line in the
        log.
        """
        del self._cache.loaded[adapter]
        try:
            await self._loader.unload(adapter)
        except Exception:
            log.exception(
                "%s could not be unloaded from the %s: its memory may not be free.",
                adapter,
                self._server,
            )
        finally:
            self._cache.taken -= 1

    def _give_up(self, error: EngineError, groups: Collection[Group[_Waiter]]) -> None:
        """Fail the requests of these groups; a later request tries again."""
        self.counts.failures += 1
        log.error("%s", error)
        for waiter in self._taken_out(groups):
            waiter.lease.set_exception(error)


class Adapters:
    """Gives requests leases on the servers that they go to."""

    def __init__(
        self,
        servers: Iterable[ServerClient],
        settings: AdapterSettings,
        tasks: TaskOwner,
        clock: Callable[[], float],
    ) -> None:
        self._loaders = {
            one: ServerLoader(one, settings.folders, settings.load_s) for one in servers
        }
        self.leases = {
            one: AdapterLeases(str(one), loader, settings, tasks, clock)
            for one, loader in self._loaders.items()
        }

    async def begin(self) -> None:
        """Begin with no adapter on any server. Raises EngineError."""
        await asyncio.gather(*(loader.clear() for loader in self._loaders.values()))

    async def of_pair(
        self, prefill: ServerClient, decode: ServerClient, adapter: str
    ) -> tuple[Lease, Lease]:
        """Leases on both servers of an attempt, prefill's first in what is returned.

        All take decode's first and keep it while they wait for prefill's, as they do with slots: a
        request that holds a lease on prefill waits for nothing more, so that no two requests wait
        for each other. Where prefill has a free place, the adapter is loaded there meanwhile.
        """
        self.leases[prefill].load_ahead(adapter)
        decode_lease = await self.leases[decode].lease(adapter)
        try:
            return await self.leases[prefill].lease(adapter), decode_lease
        except BaseException:
            decode_lease.close()
            raise

    @asynccontextmanager
    async def leased(self, server: ServerClient, adapter: str) -> AsyncIterator[float]:
        """A lease on one server while the context is open, which gives how long it was waited for.

        An adapter that turns out to be missing is loaded again.
        """
        lease = await self.leases[server].lease(adapter)
        try:
            yield lease.waited_s
        except AdapterMissing:
            await lease.missing()
            raise
        finally:
            lease.close()


_LOADED_ALREADY = re.compile(r"already (?:loaded|exists)")
"""In what SGLang says of an adapter whose name it has: `it is already loaded`, `already exists`."""
_NOT_THERE = "does not exist"


@dataclass(frozen=True, slots=True, eq=False)
class ServerLoader:
    """The adapters of `folders` on `server`, each load and each unload within `limit_s`. Meets
    `Loader`.
    """

    server: ServerClient
    folders: Mapping[str, Path]
    limit_s: float
    unsettled: set[str] = field(default_factory=set)

    async def load(self, adapter: str) -> None:
        """Raises AdapterFailed where the server refuses it, and EngineError where the server fails.

        One that the server has already, which it should not have, is taken as it is, with a
        warning.
        """
        for left in tuple(
            self.unsettled
        ):  # it takes up memory, and SGLang refuses to load it again before
            await self.unload(left)
        self.unsettled.add(adapter)  # without an answer it may still be loaded, later
        try:
            await self._post(
                "load_lora_adapter", {"lora_name": adapter, "lora_path": str(self.folders[adapter])}
            )
        except EngineRejected as refusal:
            if refusal.status >= INTERNAL_ERROR:
                raise
            self.unsettled.discard(adapter)
            if not _LOADED_ALREADY.search(str(refusal)):
                raise AdapterFailed(
                    (
                        f"The adapter {adapter!r} could not be loaded: "
                        f"{str(refusal).removesuffix('.')}."
                    ),
                    remedy=(
                        f"Check {self.folders[adapter]}, and what the server was started with "
                        "for adapters."
                    ),
                ) from refusal
            log.warning(
                "the %s had the adapter %r before this router loaded it: used as it is",
                self.server,
                adapter,
            )
        self.unsettled.discard(adapter)

    async def unload(self, adapter: str) -> None:
        """One that is not there is gone already. Raises EngineError; then it is tried again before
        the next load.
        """
        self.unsettled.add(adapter)
        try:
            await self._post("unload_lora_adapter", {"lora_name": adapter})
        except EngineRejected as refusal:
            if _NOT_THERE not in str(refusal):
                raise
        self.unsettled.discard(adapter)

    async def clear(self) -> None:
        """Unload what an earlier router left of these adapters: their files may have changed.

        Raises EngineRejected where the server takes no adapters, and EngineError.
        """
        if not (await self.server.info()).get(
            "enable_lora", True
        ):  # one that says nothing of it may
            raise EngineRejected(
                f"The {self.server.name} takes no adapters.",
                status=501,
                remedy="Start it with --enable-lora, or take adapters out of the model's settings.",
            )
        held = await self._held()
        for name in held:
            if name in self.folders:
                await self._post("unload_lora_adapter", {"lora_name": name})
        if others := sorted(set(held) - self.folders.keys()):
            log.warning(
                "the %s holds adapters of others, which take up places: %s", self.server, others
            )

    async def _held(self) -> Collection[str]:
        """The adapters that the server lists with its model: those that name it as their parent."""
        try:
            answer = await self.server.get("v1/models", limit_s=self.limit_s)
        except EngineRejected as refusal:
            if refusal.status != NOT_FOUND:
                raise
            log.info("the %s does not list its adapters: it is taken to hold none", self.server)
            return ()
        try:
            return [one["id"] for one in orjson.loads(answer)["data"] if one.get("parent")]
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise broken_wire(self.server.name, f"{answer[:200]!r}") from error

    async def _post(self, route: str, fields: Mapping[str, str]) -> None:
        try:
            await self.server.post(route, orjson.dumps(fields), limit_s=self.limit_s)
        except EngineError as error:
            self.server.failed(error)
            raise
