"""Boards of components, devices and what they cost, the systems that are compared, and their runs
in virtual time.
"""

import asyncio
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, cycle, islice

from benchmarks.coserve.pool import (
    Component,
    ComponentPool,
    Costs,
    Event,
    ExecutorSettings,
    Policies,
    Request,
    Served,
    Switched,
    Tier,
)
from benchmarks.coserve.pool.memory import Resident, two_stage
from benchmarks.coserve.pool.policies import QueueView
from benchmarks.coserve.pool.simulated import SimulatedComponents
from shell_router.errors import ConfigError
from shell_router.lab.simulation.virtual_time import run_virtual

SKEW = 1.2
DETECTORS = 12
DAMAGED = 0.05
IMAGE_EVERY_S = 0.004
BYTES = {"ResNet101": 178_000_000, "YOLOv5m": 85_000_000, "YOLOv5l": 186_000_000}
"""Four for each published parameter: 44.5, 21.2 and 46.5 million. The paper's 13 billion in 60 GB
agree with that.
"""


@dataclass(frozen=True, slots=True)
class Task:
    """`images` of a board with `types` of components, of which the one of rank r is 1/r**`skew` as
    frequent.

    With `placements` all boards have the same components in the same places, as many as that, and
    come one after the other; otherwise each image shows a component that is drawn anew.
    """

    name: str
    types: int
    images: int
    skew: float = SKEW
    placements: int = 0


TASKS = (Task("A1", 352, 2500), Task("A2", 352, 3500), Task("B1", 342, 2500), Task("B2", 342, 3500))


def shares(types: int, skew: float = SKEW) -> list[float]:
    """Per type, the share of the images that show it."""
    weights = [1 / rank**skew for rank in range(1, types + 1)]
    return [weight / sum(weights) for weight in weights]


def chain(component: int) -> tuple[str, ...]:
    """The components that look at a component, if the first finds nothing."""
    return (
        (f"type-{component}",)
        if component % 2
        else (f"type-{component}", f"detector-{component // 2 % DETECTORS}")
    )


def components(types: int, skew: float = SKEW) -> list[Component]:
    """The board's components, with usage probabilities worked out from the rules, as in section
    4.5.
    """
    usage, after = [0.0] * DETECTORS, [set[str]() for _ in range(DETECTORS)]
    catalog = []
    for component, share in enumerate(shares(types, skew)):
        catalog.append(Component(f"type-{component}", "ResNet101", BYTES["ResNet101"], share))
        if component % 2 == 0:
            detector = component // 2 % DETECTORS
            usage[detector] += share * (1 - DAMAGED)
            after[detector].add(f"type-{component}")
    for detector in range(DETECTORS):
        kind = "YOLOv5m" if detector % 2 else "YOLOv5l"
        catalog.append(
            Component(
                f"detector-{detector}",
                kind,
                BYTES[kind],
                usage[detector],
                frozenset(after[detector]),
            )
        )
    return catalog


def requests(task: Task, seed: int) -> Iterator[Request]:
    """The task's images in order; a request's sample says whether its component is damaged."""
    draw = random.Random(f"{task.name}/{seed}")
    upto = list(accumulate(shares(task.types, task.skew)))
    shown = draw.choices(range(task.types), cum_weights=upto, k=task.placements or task.images)
    for number, component in enumerate(islice(cycle(shown), task.images)):
        yield Request(str(number), chain(component), draw.random() < DAMAGED)


def route(request: Request, name: str, output: object) -> tuple[str, object] | None:
    """Damage ends the inspection."""
    then = request.after(name)
    return None if then is None or request.sample else (then, request.sample)


GB = 1_000_000_000
HOST_LOAD_S, FROM_DISK_S = 0.060, 1.1
WORK = {"ResNet101": 1.0, "YOLOv5m": 0.6, "YOLOv5l": 1.0}
ACTIVATION_BYTES = int(1.5 * BYTES["ResNet101"])


@dataclass(frozen=True, slots=True)
class Device:
    """Executors of a system on a device: `several` for each of a task's boards, `one` that has the
    whole GPU.
    """

    name: str
    disk_rate: float
    best_batch: int
    gpu_sample_s: float
    gpu_batch_s: float
    gpu_bytes: int
    cpu_bytes: int
    host_bytes: int
    gpu_experts: tuple[int, int] | None

    def costs(self, slower: float, largest: int) -> dict[str, Costs]:
        """Per architecture, on its GPU or a processor that is slower by a factor."""
        return {
            kind: Costs(
                sample_s=slower * work * self.gpu_sample_s,
                batch_s=slower * work * self.gpu_batch_s,
                largest_batch=largest,
                activation_bytes=int(work * ACTIVATION_BYTES),
                host_load_s=HOST_LOAD_S * BYTES[kind] / BYTES["ResNet101"],
                disk_load_s=self._from_disk_s(kind),
            )
            for kind, work in WORK.items()
        }

    def _from_disk_s(self, kind: str) -> float:
        share = BYTES[kind] / BYTES["ResNet101"]
        return max(FROM_DISK_S * share, BYTES[kind] / self.disk_rate + HOST_LOAD_S * share)

    def several(self, task: Task) -> list[ExecutorSettings]:
        """CoServe's best arrangement: 3 executors on the GPU for board A and 4 for board B, and one
        on the CPU.
        """
        on_gpu = 3 if task.name.startswith("A") else 4
        share = 0.75
        if self.gpu_experts:
            share = self.gpu_experts[on_gpu - 3] * BYTES["ResNet101"] / self.gpu_bytes
        each, gpu = self.gpu_bytes // on_gpu, self.costs(1.0, self.best_batch)
        executors = [
            ExecutorSettings(f"gpu-{number}", each, gpu, share) for number in range(on_gpu)
        ]
        return [*executors, ExecutorSettings("cpu", self.cpu_bytes, self.costs(6.0, 5))]

    def one(self) -> list[ExecutorSettings]:
        """Samba-CoE's: the GPU alone; where memory is shared, all of it."""
        memory_bytes = self.gpu_bytes if self.host_bytes else self.gpu_bytes + self.cpu_bytes
        return [ExecutorSettings("gpu-0", memory_bytes, self.costs(1.0, self.best_batch), 0.9)]

    def cache_bytes(self, executors: int) -> int:
        """Host memory in front of the disk: what the CPU's executor does not take."""
        return self.host_bytes + (self.cpu_bytes if executors == 1 and self.host_bytes else 0)


DEVICES = (
    Device("NUMA", 530e6, 8, 0.025, 0.015, 11 * GB, 4 * GB, 8 * GB, (35, 34)),
    Device("UMA", 3000e6, 6, 0.025, 0.015, 16 * GB, 4 * GB, 0, None),
)


def least_extension(queues: Sequence[QueueView], number: int) -> int:
    """The queue with which the longest of all queues is shortest; of equals, the one that grows
    least (Figure 8).

    Equal in that too, the shortest queue is taken, so that idle executors get work.
    """
    longest_s = max(queue.seconds for queue in queues)

    def cost(index: int) -> tuple[float, float, float]:
        queue = queues[index]
        return max(longest_s, queue.seconds + queue.added_s), queue.added_s, queue.seconds

    return min(range(len(queues)), key=cost)


def round_robin(queues: Sequence[QueueView], number: int) -> int:
    """One after the other, as Samba-CoE Parallel does (section 5.1): the request's `number` alone
    decides.
    """
    return number % len(queues)


def least_recently_used(residents: Sequence[Resident]) -> list[Resident]:
    """Samba-CoE's: the one whose last use is longest ago first."""
    return sorted(residents, key=lambda one: one.used)


def first_in_first_out(residents: Sequence[Resident]) -> list[Resident]:
    """Samba-CoE FIFO's: the one that was loaded first."""
    return sorted(residents, key=lambda one: one.loaded)


POLICIES: Mapping[str, Policies] = {
    "ours": Policies(),
    "coserve": Policies(least_extension, evict=two_stage, prefetch=0),
    "samba-coe": Policies(round_robin, 0.0, least_recently_used, least_recently_used, prefetch=0),
    "samba-coe-fifo": Policies(
        round_robin, 0.0, first_in_first_out, first_in_first_out, prefetch=0
    ),
}
"""Samba-CoE runs on one executor; on several, taking turns, it is the paper's Samba-CoE Parallel.
"""


def fewest_switches_in_any_order(needed: Iterable[str], loaded_first: Collection[str]) -> int:
    """What no schedule undercuts: each component that is needed and was not loaded at first is
    loaded once.
    """
    return len(set(needed) - set(loaded_first))


def fewest_switches_in_this_order(
    served: Sequence[str],
    loaded_first: Collection[str],
    memory_bytes: Mapping[str, int],
    budget_bytes: int,
) -> int:
    """Loads of the best eviction for the components of the batches `served` in turn, by Belady's
    rule.

    The rule is exact where all components are of one size. For mixed sizes each size gets the whole
    budget for itself, so that this is a bound from below. Raises ConfigError where a component does
    not fit.
    """
    if too_large := [name for name in served if memory_bytes[name] > budget_bytes]:
        raise ConfigError(f"{budget_bytes} bytes do not hold {too_large[0]}.", remedy="Give more.")
    loads = 0
    for size in {memory_bytes[name] for name in served}:
        alike = [name for name in served if memory_bytes[name] == size]
        loads += _belady(
            alike,
            [name for name in loaded_first if memory_bytes[name] == size],
            budget_bytes // size,
        )
    return loads


def _belady(served: Sequence[str], loaded_first: Collection[str], room: int) -> int:
    next_use = _next_uses(served)
    first_use = {name: place for place, name in reversed(list(enumerate(served)))}
    held = {name: first_use.get(name, len(served)) for name in loaded_first}
    furthest = [(-use, name) for name, use in held.items()]
    heapify(furthest)
    loads = 0
    for place, name in enumerate(served):
        if name not in held:
            loads += 1
            while len(held) >= room:
                use, leaving = heappop(furthest)
                if held.get(leaving) == -use:  # entries of earlier uses are left in the heap
                    del held[leaving]
        held[name] = next_use[place]
        heappush(furthest, (-next_use[place], name))
    return loads


def _next_uses(served: Sequence[str]) -> list[int]:
    """For each place, the next place of the same component; the length where there is none."""
    seen: dict[str, int] = {}
    uses = [len(served)] * len(served)
    for place in range(len(served) - 1, -1, -1):
        uses[place] = seen.get(served[place], len(served))
        seen[served[place]] = place
    return uses


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run took and how often it switched; `fewest`: in any order, `fewest_so`: in the order
    it served.
    """

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
    task: Task,
    device: Device,
    executors: list[ExecutorSettings],
    policies: Policies,
    *,
    seed: int,
    every_s: float,
) -> Outcome:
    """Ask all images of the task, one each `every_s`; CPU time is that of the whole run, simulation
    included.
    """
    begun_s = time.process_time()
    events, loaded, seconds = run_virtual(_stream(task, device, executors, policies, seed, every_s))
    cpu_s = time.process_time() - begun_s
    switched = [event for event in events if isinstance(event, Switched)]
    served = [event for event in events if isinstance(event, Served)]
    sizes = {
        component.name: component.memory_bytes for component in components(task.types, task.skew)
    }
    return Outcome(
        task.images,
        seconds,
        len(switched),
        sum(event.tier is Tier.DISK for event in switched),
        fewest_switches_in_any_order(
            (event.component for event in served),
            {name for executor in executors for name in loaded[executor.name]},
        ),
        sum(
            fewest_switches_in_this_order(
                [event.component for event in served if event.executor == executor.name],
                loaded[executor.name],
                sizes,
                executor.shelf_bytes,
            )
            for executor in executors
        ),
        cpu_s,
    )


async def _stream(
    task: Task,
    device: Device,
    executors: list[ExecutorSettings],
    policies: Policies,
    seed: int,
    every_s: float,
) -> tuple[list[Event], dict[str, tuple[str, ...]], float]:
    loop, events = asyncio.get_running_loop(), list[Event]()
    catalog = components(task.types, task.skew)
    processors = {executor.name: executor.name.split("-")[0] for executor in executors}
    pool = ComponentPool(
        catalog,
        executors,
        SimulatedComponents(executors, processors),
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
