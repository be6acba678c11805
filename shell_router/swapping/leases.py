"""Leases on models that take turns, and the loads that give every request its lease."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from shell_router.core.durations import Durations
from shell_router.errors import EngineError, EngineUnavailable, ModelFailed, WeightsLost
from shell_router.http.tasks import TaskOwner
from shell_router.swapping.turns import Group, LoadedModel, Order, Turns

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LeaseCounts:
    """Durations of loads and of requests' waits; counts of failed loads and of lost weights."""

    loads: Durations = field(default_factory=Durations)
    waits: Durations = field(default_factory=Durations)
    failures: int = 0
    missing: int = 0


class Loader(Protocol):
    """Loads and unloads models, one at a time."""

    async def load(self, model: str) -> None:
        """Load the model. A load that raises, or is cancelled, leaves nothing behind."""

    async def unload(self, model: str) -> None:
        """Unload the model. An error is logged; the model then counts as gone."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    lease: asyncio.Future[LoadedModel]
    arrived_s: float


class ModelLeases:
    """Leases on the models in memory, and the loads that give every request its lease.

    Any number of requests may lease the same model, which stays while one of them does. At most
    `places` models are loaded at a time; `window_s` and `order` are as in `Turns`. A request waits
    at most `wait_s`. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        loader: Loader,
        tasks: TaskOwner,
        clock: Callable[[], float],
        *,
        places: int,
        window_s: float,
        wait_s: float,
        order: Order,
    ) -> None:
        self.counts = LeaseCounts()
        self._loader = loader
        self._wait_s = wait_s
        self._tasks = tasks
        self._clock = clock
        self._turns: Turns[_Waiter] = Turns(places, window_s, order)
        self._lock = asyncio.Lock()
        self._is_loading = False

    @property
    def loaded(self) -> tuple[str, ...]:
        """The models in memory."""
        return tuple(self._turns.loaded)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their model."""
        return sum(len(group.waiters) for group in self._turns.groups)

    def serves(self, model: str) -> bool:
        """Whether a request would get the model without waiting."""
        return self._turns.serves(model)

    @asynccontextmanager
    async def lease(self, model: str) -> AsyncIterator[None]:
        """Wait until the model is loaded, and keep it loaded while the context is open.

        If the body raises WeightsLost, the model is unloaded, and loaded again for others.

        Raises:
            ModelFailed: The model does not load.
            EngineError: The model's engine fails.
            EngineUnavailable: No place comes free, or the load does not end, within `wait_s`.
        """
        lease = await self._wait_for(model)
        try:
            yield
        except WeightsLost:
            await self._forget(lease)
            raise
        finally:
            self._release(lease)

    def load_ahead(self, model: str) -> None:
        """Load a model that will be asked for soon, if no request waits and a place can be freed.

        Only models that no request uses or waits for are unloaded for it.
        """
        turns = self._turns
        if not turns.is_coming(model) and not turns.groups:
            if model not in turns.ahead:
                turns.ahead.append(model)
            self._advance()

    async def _wait_for(self, model: str) -> LoadedModel:
        turns = self._turns
        turns.drain(self._clock())
        if turns.serves(model):
            return turns.pin(model)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), self._clock())
        turns.wait(model, waiter, waiter.arrived_s)
        self._advance()
        try:
            async with asyncio.timeout(self._wait_s):
                return await waiter.lease
        except BaseException as error:
            self._withdraw(waiter)
            if isinstance(error, TimeoutError):
                raise self._build_timeout(model) from error
            raise

    def _withdraw(self, waiter: _Waiter) -> None:
        """Take the request out of the queue, or give back a lease that has just come."""
        if self._turns.leave(waiter):
            self._advance()
            return
        lease = waiter.lease
        if lease.done() and not lease.cancelled() and lease.exception() is None:
            self._release(lease.result())

    def _release(self, lease: LoadedModel) -> None:
        lease.pins -= 1
        self._advance()

    async def _forget(self, lost: LoadedModel) -> None:
        """Unload the model, whose weights are lost, unless another request has done so."""
        async with self._lock:
            if self._turns.loaded.get(lost.name) is lost:
                self.counts.missing += 1
                log.warning("the weights of %r are lost, and are loaded again", lost.name)
                await self._unload(lost.name)
        self._advance()

    # --- granting

    def _advance(self) -> None:
        """Grant leases, and start to load the next model; call it whenever something changes."""
        self._grant()
        if not self._is_loading and self._turns.next_to_load() is not None:
            self._is_loading = True
            self._tasks.start(self._load_all())

    def _grant(self) -> None:
        """Grant leases to the groups whose models are loaded and not drained.

        The groups are served one by one, because serving one may decide which models are drained.
        """
        turns = self._turns
        turns.drain(self._clock())
        while group := self._find_served():
            now_s = self._clock()
            for waiter in self._take_waiters([group]):
                self.counts.waits.add(now_s - waiter.arrived_s)
                waiter.lease.set_result(turns.pin(group.model))
            turns.drain(self._clock())

    def _find_served(self) -> Group[_Waiter] | None:
        for group in self._turns.groups:
            if self._turns.serves(group.model):
                return group
        return None

    def _take_waiters(self, groups: Collection[Group[_Waiter]]) -> list[_Waiter]:
        """Remove these groups; return their requests, except requests that have just given up."""
        self._turns.groups = [group for group in self._turns.groups if group not in groups]
        return [waiter for group in groups for waiter in group.waiters if not waiter.lease.done()]

    def _build_timeout(self, model: str) -> EngineUnavailable:
        if self._turns.is_coming(model):
            return EngineUnavailable(
                f"The model {model!r} was still being loaded after {self._wait_s:g} s.",
                remedy="Look at the engines' load and logs, or raise wait_s.",
            )
        return EngineUnavailable(
            f"No place for the model {model!r} came free within {self._wait_s:g} s.",
            remedy="Ask again later, raise wait_s, or allow more models at a time: by "
            "max_loaded_models or pairs.",
        )

    # --- loading

    async def _load_all(self) -> None:
        """Load awaited models one after the other, while there are places.

        If no place can be freed, it ends; the next lease that is given back starts it again.
        """
        turns = self._turns
        has_place = True
        try:
            while has_place and (awaited := turns.next_to_load()) is not None:
                model, turn = awaited
                turns.loading = model
                try:
                    has_place = await self._load(model, turn)
                except ModelFailed as error:
                    self._fail(error, [group for group in turns.groups if group.model == model])
                except EngineError as error:  # the engines fail, so every waiting request fails
                    turns.ahead.clear()
                    self._fail(error, turns.groups)
                except Exception as error:
                    log.exception("loading %r", model)
                    self._fail(ModelFailed(f"{error!r}", remedy="Please report it."), turns.groups)
                finally:
                    turns.loading = None
                    if model in turns.ahead:
                        turns.ahead.remove(model)
                self._grant()
        finally:
            self._is_loading = False

    async def _load(self, model: str, turn: int) -> bool:
        """Load the model; False if there is no place for it."""
        async with self._lock:
            if not await self._make_room(turn):
                return False
            begun_s = self._clock()
            self._turns.taken += 1
            try:
                await self._loader.load(model)
            except BaseException:
                self._turns.taken -= 1
                raise
            self._turns.add(model)
        load_s = self._clock() - begun_s
        self.counts.loads.add(load_s)
        log.info("the model %r is loaded after %.0f ms", model, 1e3 * load_s)
        return True

    async def _make_room(self, turn: int) -> bool:
        """Unload models until there is a place; False if the models that may leave are too few."""
        while (victims := self._turns.victims(turn)) is not None:
            if not victims:
                return True
            await self._unload(victims[0])
        return False

    async def _unload(self, model: str) -> None:
        """Unload the model. If that fails, the model counts as unloaded, too."""
        del self._turns.loaded[model]
        try:
            await self._loader.unload(model)
        except Exception:
            log.exception("%s could not be unloaded: its memory may not be free", model)
        finally:
            self._turns.taken -= 1

    def _fail(self, error: EngineError, groups: Collection[Group[_Waiter]]) -> None:
        """Fail the requests of these groups. A later request tries again."""
        self.counts.failures += 1
        log.error("%s", error)
        for waiter in self._take_waiters(groups):
            waiter.lease.set_exception(error)
