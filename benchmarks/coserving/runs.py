"""One task on one device under one system's policies, in virtual time."""

import asyncio
import time
from dataclasses import dataclass

from benchmarks.coserving.boards import Task, experts, requests, route
from benchmarks.coserving.devices import Device
from shell_router.engines.simulated.experts import SimulatedExperts
from shell_router.expert_pools import Event, ExecutorSettings, ExpertPool, Policies, Served, Switched, Tier
from shell_router.expert_pools.bounds import fewest_switches_in_any_order, fewest_switches_in_this_order
from shell_router.simulation.virtual_time import run_virtual


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run took and how often it switched; `fewest`: in any order, `fewest_so`: in the order it served."""

    images: int
    seconds: float
    switches: int
    from_disk: int
    fewest: int
    fewest_so: int
    cpu_s: float

    @property
    def throughput(self) -> float:
        """Images a second."""
        return self.images / self.seconds


def run(
    task: Task, device: Device, executors: list[ExecutorSettings], policies: Policies, *, seed: int, every_s: float
) -> Outcome:
    """Ask all images of the task, one each `every_s`; CPU time is that of the whole run, simulation included."""
    begun_s = time.process_time()
    events, loaded, seconds = run_virtual(_stream(task, device, executors, policies, seed, every_s))
    cpu_s = time.process_time() - begun_s
    switched = [event for event in events if isinstance(event, Switched)]
    served = [event for event in events if isinstance(event, Served)]
    sizes = {expert.name: expert.memory_bytes for expert in experts(task.types)}
    return Outcome(
        task.images,
        seconds,
        len(switched),
        sum(event.tier is Tier.DISK for event in switched),
        fewest_switches_in_any_order(
            (event.expert for event in served), {name for executor in executors for name in loaded[executor.name]}
        ),
        sum(
            fewest_switches_in_this_order(
                [event.expert for event in served if event.executor == executor.name],
                loaded[executor.name],
                sizes,
                executor.shelf_bytes,
            )
            for executor in executors
        ),
        cpu_s,
    )


async def _stream(
    task: Task, device: Device, executors: list[ExecutorSettings], policies: Policies, seed: int, every_s: float
) -> tuple[list[Event], dict[str, tuple[str, ...]], float]:
    loop, events = asyncio.get_running_loop(), list[Event]()
    catalogue = experts(task.types)
    processors = {executor.name: executor.name.split("-")[0] for executor in executors}
    pool = ExpertPool(
        catalogue,
        executors,
        SimulatedExperts(executors, processors),
        policies,
        host_bytes=device.cache_bytes(len(executors)),
        route=route,
        watch=events.append,
    )
    async with pool:
        loaded, begun_s = pool.loaded(), loop.time()
        async with asyncio.TaskGroup() as tasks:
            for request in requests(task, seed):
                tasks.create_task(pool.ask(request))
                await asyncio.sleep(every_s)
        return events, loaded, loop.time() - begun_s
