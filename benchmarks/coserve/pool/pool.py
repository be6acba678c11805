"""A component pool: many components, memory for a few of them, and requests that need one after the
other.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from benchmarks.coserve.pool.errors import (
    ComponentError,
    ComponentFailed,
    ComponentTooLarge,
    UnknownComponent,
)
from benchmarks.coserve.pool.executor import ComponentExecutor, Event, HostTier, Watch
from benchmarks.coserve.pool.memory import Memory, Shelf
from benchmarks.coserve.pool.policies import Policies, host_placement, initial_placement
from benchmarks.coserve.pool.values import (
    Component,
    Components,
    ExecutorSettings,
    Request,
    Stage,
    Tier,
)
from shell_router.errors import InvalidRequest

log = logging.getLogger(__name__)

Route = Callable[[Request, str, Any], tuple[str, Any] | None]
"""From a request, one of its components and what that gave: the next component and its sample, or
None at the end.
"""


def follow_chain(request: Request, component: str, output: Any) -> tuple[str, Any] | None:
    """The chain's next component, which gets the request's own sample, as in the paper's inspection
    of boards.
    """
    then = request.after(component)
    if then is None:
        return None
    return (then, request.sample)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request's components gave, in the order in which they were asked; never empty."""

    outputs: tuple[tuple[str, Any], ...]

    @property
    def final(self) -> Any:
        """The last component's output."""
        return self.outputs[-1][1]


def ignore(event: Event) -> None:
    """A watch that does nothing."""


class ComponentPool:
    """Open while its context is; then any number of tasks may `ask` it. It takes its time from the
    event loop.

    `host_bytes` of host memory keep what was read from disk; with 0 all comes from disk.
    """

    def __init__(
        self,
        catalog: Iterable[Component],
        executors: Sequence[ExecutorSettings],
        components: Components,
        policies: Policies,
        *,
        host_bytes: int = 0,
        route: Route = follow_chain,
        watch: Watch = ignore,
    ) -> None:
        self._catalog = {component.name: component for component in catalog}
        self._assign = policies.assign
        self._route = route
        self.host_memory = Memory("host memory", host_bytes)
        shelf = Shelf(
            Tier.HOST,
            self.host_memory,
            host_bytes,
            policies.evict_host,
            components,
            self._host_outlook,
        )
        self._host = HostTier(shelf)
        hooks: dict[str, Any] = {
            "is_loaded": self._is_loaded,
            "settled": self._settled,
            "watch": watch,
        }
        self.executors = [
            ComponentExecutor(settings, policies, self._catalog, components, self._host, **hooks)
            for settings in executors
        ]
        self._asked: dict[str, tuple[Stage, asyncio.Future[Any]]] = {}
        self._able_for: dict[str, Sequence[ComponentExecutor]] = {}
        self._number = 0
        self._running: asyncio.Task[None] | None = None

    @property
    def asked(self) -> int:
        """Requests that were asked and not yet answered."""
        return len(self._asked)

    def loaded(self) -> dict[str, tuple[str, ...]]:
        """Per executor, and for host memory, the components that are there."""
        executors = {executor.settings.name: tuple(executor.shelf) for executor in self.executors}
        return {**executors, Tier.HOST: tuple(self._host.shelf)}

    async def __aenter__(self) -> Self:
        """Load the most probable components; one that does not load is left out, with a warning."""
        try:
            await self._fill()
        except BaseException:
            await self._empty()
            raise
        self._running = asyncio.create_task(self._run(), name="component pool")
        self._running.add_done_callback(self._fail_all)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Requests that still wait fail. Raises what ended an executor, which is a defect."""
        assert self._running is not None
        self._running.cancel()
        try:
            await asyncio.wait({self._running})
        finally:
            await self._empty()
        if not self._running.cancelled() and (defect := self._running.exception()):
            raise defect

    async def _fill(self) -> None:
        """Load the most probable components, and the next ones into host memory (section 4.1)."""
        catalog = self._catalog.values()
        placed = initial_placement(catalog, [executor.settings for executor in self.executors])

        async def fill(executor: ComponentExecutor) -> None:
            for component in placed[executor.settings.name]:
                try:
                    await executor.bring(component, announce=False)
                except ComponentFailed as error:
                    log.warning("%s The pool starts without it.", error)

        await asyncio.gather(*map(fill, self.executors))
        elsewhere = frozenset(
            component.name for components in placed.values() for component in components
        )
        for component in host_placement(catalog, self.host_memory.budget_bytes, elsewhere):
            try:
                async with self._host.through(component):
                    pass
            except Exception as error:
                log.warning(
                    "%s could not be read (%s). The pool starts without it.", component.name, error
                )

    async def _empty(self) -> None:
        for shelf in (*(executor.shelf for executor in self.executors), self._host.shelf):
            for name in tuple(shelf):
                await shelf.drop(name)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for executor in self.executors:
                tasks.create_task(executor.run(), name=executor.settings.name)

    def _fail_all(self, ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and (defect := ended.exception()):
            log.error(
                "A defect ended the component pool, which answers no more requests.",
                exc_info=defect,
            )
        for _, future in self._asked.values():
            if not future.done():
                future.set_exception(_closed(ended))

    async def ask(self, request: Request) -> Answer:
        """All of the request's components, one after the other.

        Raises UnknownComponent, ComponentTooLarge, ComponentFailed, ComponentError where the pool
        is closed, InvalidRequest for an id that is being asked, and what the route raises.
        Cancelled, the request leaves its queue; a batch that it is in goes on for the others.
        """
        if self._running is None or self._running.done():
            raise _closed(self._running)
        for name in request.chain:
            self._able(name)
        outputs: list[tuple[str, Any]] = []
        step: tuple[str, Any] | None = (request.chain[0], request.sample)
        while step is not None:
            name, sample = step
            output = await self._stage(request, name, sample)
            outputs.append((name, output))
            step = self._route(request, name, output)
        return Answer(tuple(outputs))

    async def _stage(self, request: Request, name: str, sample: Any) -> Any:
        if request.id in self._asked:
            raise InvalidRequest(
                f"A request {request.id!r} is being served.", remedy="Give each an id of its own."
            )
        loop = asyncio.get_running_loop()
        executor = self._chosen(name, loop.time())
        stage = Stage(request, name, sample, loop.time())
        future = loop.create_future()
        self._asked[request.id] = stage, future
        try:
            executor.add(stage)
            return await future
        finally:
            del self._asked[request.id]
            executor.withdraw(request.id)

    def _chosen(self, name: str, now_s: float) -> ComponentExecutor:
        able = self._able(name)
        chosen = able[
            self._assign([one.view(self._catalog[name], now_s) for one in able], self._number)
        ]
        self._number += 1
        return chosen

    def _able(self, name: str) -> Sequence[ComponentExecutor]:
        """The executors that it fits on."""
        if able := self._able_for.get(name):
            return able
        component = self._catalog.get(name)
        if component is None:
            raise UnknownComponent(
                f"There is no component {name!r}.", remedy="Name one of the pool's catalog."
            )
        able = [executor for executor in self.executors if executor.settings.takes(component)]
        if not able:
            raise ComponentTooLarge(
                (
                    f"{name} of {component.memory_bytes} bytes and one sample fit into no "
                    "executor's "
                    "memory."
                ),
                remedy=(
                    "Raise an executor's memory_bytes or component_share, or give it costs "
                    "for this architecture."
                ),
            )
        self._able_for[name] = able
        return able

    def _settled(self, stage: Stage, outcome: Any) -> None:
        """Answer what waits for it: not a request that was cancelled, even if one of the same id
        was asked since.
        """
        asked, future = self._asked.get(stage.request.id, (None, None))
        if asked is not stage or future is None or future.done():
            return
        if isinstance(outcome, ComponentError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _is_loaded(self, name: str) -> bool:
        """On any executor: a request goes from one to another between its components."""
        return any(name in executor.shelf for executor in self.executors)

    def _host_outlook(self, components: list[Component]) -> list[tuple[int | None, bool]]:
        """All that an executor without them waits for have the same turn; those that an executor
        has are idle here.
        """

        def waits(name: str) -> bool:
            return any(
                one.queue.waits_for(name) and name not in one.shelf for one in self.executors
            )

        return [(0 if waits(one.name) else None, self._is_loaded(one.name)) for one in components]


def _closed(ended: asyncio.Task[None] | None) -> ComponentError:
    if ended is not None and ended.done() and not ended.cancelled():
        return ComponentError(
            "The pool was ended by a defect.", remedy="Its log names it. Open the pool again."
        )
    return ComponentError("The pool is closed.", remedy="Ask while its context is open.")
