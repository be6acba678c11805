"""An expert pool: many experts, memory for a few of them, and requests that need one after the other."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from shell_router.errors import ConfigError, ExpertError, ExpertTooLarge, InvalidRequest, UnknownExpert
from shell_router.expert_pools.assigning import ASSIGNMENTS
from shell_router.expert_pools.events import Event, Watch
from shell_router.expert_pools.executor import Executor
from shell_router.expert_pools.experts import Experts
from shell_router.expert_pools.filling import empty, fill
from shell_router.expert_pools.host import HostTier
from shell_router.expert_pools.memory import Memory
from shell_router.expert_pools.policies import Policies
from shell_router.expert_pools.shelf import Shelf
from shell_router.expert_pools.values import ExecutorSettings, Expert, Request, Stage, Tier

log = logging.getLogger(__name__)

Route = Callable[[Request, str, Any], tuple[str, Any] | None]
"""From a request, one of its experts and what that gave: the next expert and its sample, or None at the end."""


def follow_chain(request: Request, expert: str, output: Any) -> tuple[str, Any] | None:
    """The chain's next expert, which gets the request's own sample, as in the paper's inspection of boards."""
    then = request.after(expert)
    return None if then is None else (then, request.sample)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request's experts gave, in the order in which they were asked; never empty."""

    outputs: tuple[tuple[str, Any], ...]

    @property
    def final(self) -> Any:
        """The last expert's output."""
        return self.outputs[-1][1]


def tell_nobody(event: Event) -> None:
    """The watch of who watches nothing."""


class ExpertPool:
    """Open while its context is; then any number of tasks may `ask` it. It takes its time from the event loop.

    `host_bytes` of host memory keep what was read from disk; with 0 all comes from disk.
    """

    def __init__(
        self,
        catalogue: Iterable[Expert],
        executors: Sequence[ExecutorSettings],
        experts: Experts,
        policies: Policies,
        *,
        host_bytes: int = 0,
        route: Route = follow_chain,
        watch: Watch = tell_nobody,
    ) -> None:
        self._catalogue = _by_name(catalogue)
        _check(self._catalogue, executors)
        self._assign = ASSIGNMENTS[policies.assign]
        self._route = route
        self.host_memory = Memory("host memory", host_bytes)
        shelf = Shelf(Tier.HOST, self.host_memory, host_bytes, policies.evict_host, experts, self._host_outlook)
        self._host = HostTier(shelf)
        self.executors = [
            Executor(
                settings,
                policies,
                self._catalogue.__getitem__,
                experts,
                self._host,
                is_loaded=self._is_loaded,
                answered=self._answered,
                failed=self._failed,
                watch=watch,
            )
            for settings in executors
        ]
        self._asked: dict[str, tuple[Stage, asyncio.Future[Any]]] = {}
        self._able_for: dict[str, Sequence[Executor]] = {}
        self._number = 0
        self._running: asyncio.Task[None] | None = None

    @property
    def asked(self) -> int:
        """Requests that were asked and not yet answered."""
        return len(self._asked)

    def loaded(self) -> dict[str, tuple[str, ...]]:
        """Per executor, and for host memory, the experts that lie there."""
        return {
            **{executor.settings.name: tuple(executor.shelf) for executor in self.executors},
            Tier.HOST: tuple(self._host.shelf),
        }

    async def __aenter__(self) -> Self:
        """Load the most probable experts; one that does not load is left out, with a warning."""
        try:
            await fill(self._catalogue.values(), self.executors, self._host, self.host_memory.budget_bytes)
        except BaseException:
            await empty(self.executors, self._host)
            raise
        self._running = asyncio.create_task(self._run(), name="expert pool")
        self._running.add_done_callback(self._tell_who_waits)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whoever still waits is told that the pool was closed. Raises what ended an executor, which is a defect."""
        assert self._running is not None
        self._running.cancel()
        try:
            await asyncio.wait({self._running})
        finally:
            await empty(self.executors, self._host)
        if not self._running.cancelled() and (defect := self._running.exception()):
            raise defect

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for executor in self.executors:
                tasks.create_task(executor.run(), name=executor.settings.name)

    def _tell_who_waits(self, ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and (defect := ended.exception()):
            log.error("A defect ended the expert pool, which answers nobody any more.", exc_info=defect)
        for _, future in self._asked.values():
            if not future.done():
                future.set_exception(_closed(ended))

    async def ask(self, request: Request) -> Answer:
        """All of the request's experts, one after the other.

        Raises UnknownExpert, ExpertTooLarge, ExpertFailed, ExpertError where the pool is closed, InvalidRequest for an
        id that is being asked, and what the route raises.

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
            raise InvalidRequest(f"A request {request.id!r} is being served.", remedy="Give each an id of its own.")
        loop = asyncio.get_running_loop()
        executor = self._chosen(self._able(name), self._catalogue[name], loop.time())
        stage, future = Stage(request, name, sample, loop.time()), loop.create_future()
        self._asked[request.id] = stage, future
        try:
            executor.add(stage)
            return await future
        finally:
            del self._asked[request.id]
            executor.withdraw(request.id)

    def _chosen(self, able: Sequence[Executor], expert: Expert, now_s: float) -> Executor:
        views = [executor.view(expert, now_s) for executor in able]
        chosen = able[self._assign(views, self._number)]
        self._number += 1
        return chosen

    def _able(self, name: str) -> Sequence[Executor]:
        """The executors that it fits on."""
        if able := self._able_for.get(name):
            return able
        expert = self._catalogue.get(name)
        if expert is None:
            raise UnknownExpert(f"There is no expert {name!r}.", remedy="Name one of the pool's catalogue.")
        able = [executor for executor in self.executors if executor.settings.takes(expert)]
        if not able:
            raise ExpertTooLarge(
                f"{name} of {expert.memory_bytes} bytes and one sample fit into no executor's memory.",
                remedy="Raise an executor's memory_bytes or expert_share, or give it costs for this architecture.",
            )
        self._able_for[name] = able
        return able

    def _answered(self, stage: Stage, output: Any) -> None:
        if future := self._waiting(stage):
            future.set_result(output)

    def _failed(self, stage: Stage, error: ExpertError) -> None:
        if future := self._waiting(stage):
            future.set_exception(error)

    def _waiting(self, stage: Stage) -> asyncio.Future[Any] | None:
        """Who is to be told; None where the request was cancelled, even if one of the same id was asked since."""
        asked, future = self._asked.get(stage.request.id, (None, None))
        return future if asked is stage and future is not None and not future.done() else None

    def _is_loaded(self, name: str) -> bool:
        """On any executor: a request goes from one to another between its experts."""
        return any(name in executor.shelf for executor in self.executors)

    def _host_outlook(self, experts: list[Expert]) -> list[tuple[int | None, bool]]:
        """All are wanted alike that somebody waits for without having them; those that an executor has are spare."""
        return [(self._turn(expert.name), self._is_loaded(expert.name)) for expert in experts]

    def _turn(self, name: str) -> int | None:
        waits = any(executor.line.waits_for(name) and name not in executor.shelf for executor in self.executors)
        return 0 if waits else None


def _closed(ended: asyncio.Task[None] | None) -> ExpertError:
    if ended is not None and ended.done() and not ended.cancelled():
        return ExpertError("The pool was ended by a defect.", remedy="Its log names it. Open the pool again.")
    return ExpertError("The pool is closed.", remedy="Ask while its context is open.")


def _by_name(catalogue: Iterable[Expert]) -> dict[str, Expert]:
    found: dict[str, Expert] = {}
    for expert in catalogue:
        if found.setdefault(expert.name, expert) is not expert:
            raise ConfigError(f"{expert.name!r} stands in the catalogue twice.", remedy="Give each a name of its own.")
    return found


def _check(catalogue: dict[str, Expert], executors: Sequence[ExecutorSettings]) -> None:
    if not executors or len({executor.name for executor in executors}) < len(executors):
        raise ConfigError("A pool needs executors with names of their own.", remedy="Name at least one.")
    for expert in catalogue.values():
        if unknown := sorted(expert.after - catalogue.keys()):
            raise ConfigError(
                f"Expert {expert.name!r} follows on {unknown[0]!r}, which is not in the catalogue.",
                remedy="Add that one, or take it out of `after`.",
            )
