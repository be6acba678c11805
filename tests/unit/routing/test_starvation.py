"""No request starves: 1,000 arrival traces through the router's queue and the plugin's order of
SGLang's, in virtual time.

The bound: a request that has waited `age_s` is overtaken by none that arrived later. From then on
the places that it may take do only what ran there at that moment and what had not arrived after it,
so that it waits at most

    age_s + (what was left to run there + the durations of earlier requests that waited) / places
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

import pytest

from shell_router.core.engine import Hints
from shell_router.routing.dispatcher import Dispatcher, EngineSlot, SchedulingSettings
from shell_router.routing.engine_selection import SelectionSettings
from shell_router.routing.failures import Breaker, BreakerSettings
from shell_router.routing.placement import EngineReport, PlacementRequest
from shell_router.routing.queue import QueueSettings
from shell_router.sglang_plugin.waiting_queue import make_reorder

AGE_S = 5.0
TRACES = 1000


@dataclass(eq=False)
class Asked:
    """A request, and what became of it: when it started, and the engines that it might have been
    sent to.
    """

    arrived_s: float
    tokens: int
    prefill_s: float
    duration_s: float
    growing: str | None = None
    update: bool = False
    started_s: float = field(default=-1.0)
    engine: int = 0
    able: Sequence[int] = ()


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, for engines with as many places each."""

    asked: Sequence[Asked]
    engines: int
    places: int
    queue: QueueSettings


def drawn(seed: int) -> Trace:
    """Floods of short requests around a few long ones, at about the capacity or twice it, in bursts
    or evenly.
    """
    draw = random.Random(seed)
    engines, places = draw.choice(((1, 1), (1, 3), (2, 1), (3, 2)))
    mean_s = draw.uniform(0.2, 3.0)
    gap_s = mean_s / (engines * places) / draw.uniform(0.9, 2.0)
    bursts, growing, updates = draw.random() < 0.3, draw.random() < 0.3, draw.random() < 0.3
    asked, now_s = [], 0.0
    for _ in range(draw.randint(15, 40)):
        now_s += (
            draw.expovariate(1 / gap_s) if not bursts else draw.choice((0.0, 0.0, 0.0, 4 * gap_s))
        )
        is_long = draw.random() < 0.15
        duration_s = draw.uniform(0.1, 2.0) * mean_s * (2 if is_long else 0.7)
        key = f"prompt {draw.randrange(3)}" if growing and draw.random() < 0.4 else None
        update = updates and key is not None and draw.random() < 0.5
        tokens = draw.randint(2000, 9000) if is_long else draw.randint(1, 300)
        asked.append(Asked(now_s, tokens, 0.3 * duration_s, duration_s, key, update))
    limits = (
        {"max_running": places},
        {"max_prefill_tokens": 2000 * places},
        {"max_tokens": 4000 * places},
    )
    limit = draw.choice((limits[0], *limits))
    queue = QueueSettings(
        "shortest_prefill", draw.choice(("place", "arrival")), age_s=AGE_S, **limit
    )
    return Trace(asked, engines, places, queue)


class Clock:
    """Virtual time: `run` calls what is due, in its order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def __call__(self) -> float:
        return self.now_s

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when_s, next(self._number), do))

    def run(self) -> None:
        while self._due:
            self.now_s, _, do = heapq.heappop(self._due)
            do()


def through_the_router(trace: Trace) -> None:
    """The real dispatcher, queue and Algorithm 1; only the engines are pretended."""
    clock = Clock()
    engines = [(at, f"engine-{at}", Breaker(BreakerSettings())) for at in range(trace.engines)]
    selection = SelectionSettings("gimbal")
    dispatcher: Dispatcher[int] = Dispatcher(
        engines, SchedulingSettings(selection, trace.queue), clock
    )

    def started(one: Asked, slot: EngineSlot[int]) -> None:
        one.started_s, one.engine = clock(), slot.engine
        clock.at(clock() + one.prefill_s, slot.note_prefill)
        clock.at(clock() + one.duration_s, slot.close)

    def arrive(one: Asked) -> None:
        for at in range(trace.engines):
            dispatcher.report(at, EngineReport(0.1, 0, 0, 0))
        hints = Hints("tenant", end_user=one.growing)
        found = dispatcher.submit(
            PlacementRequest(one.tokens, None, 10, hints, one.growing, one.update)
        )
        if isinstance(found, EngineSlot):
            one.able = (found.engine,)
            started(one, found)
            return
        one.able = range(trace.engines) if found.bound is None else (found.bound.index,)
        found.decided = lambda: started(one, found.slot)

    for one in trace.asked:
        clock.at(one.arrived_s, lambda one=one: arrive(one))  # type: ignore[misc]
    clock.run()
    assert dispatcher.waiting == 0


def through_sglang(trace: Trace) -> None:
    """What the plugin makes of SGLang's waiting queue, which an engine reads from the front."""
    clock, waiting, running = Clock(), list[SimpleNamespace](), [0]
    reorder = make_reorder(AGE_S, clock, lambda: 1)
    policy = SimpleNamespace(enable_priority_scheduling=False)

    def fill() -> None:
        reorder(None, policy, waiting)
        while waiting and running[0] < trace.places:
            one = waiting.pop(0).one
            one.started_s, running[0] = clock(), running[0] + 1
            clock.at(clock() + one.duration_s, end)

    def end() -> None:
        running[0] -= 1
        fill()

    def arrive(one: Asked) -> None:
        one.able, one.update = (0,), False  # an update ages as well there
        stats = SimpleNamespace(wait_queue_entry_time=clock())
        request = SimpleNamespace(
            one=one,
            time_stats=stats,
            origin_input_ids=range(one.tokens),
            bootstrap_host=None,
            bootstrap_port=None,
        )
        waiting.append(request)
        fill()

    for one in trace.asked:
        clock.at(one.arrived_s, lambda one=one: arrive(one))  # type: ignore[misc]
    clock.run()
    assert not waiting


EPSILON_S = 1e-6


def starved(trace: Trace, *, by_places: bool) -> list[tuple[Asked, str]]:
    """The requests of clients that waited longer than the bound allows, and how that was found.

    Seconds are known only `by_places`: under other limits than `max_running` a place is no fixed
    number.
    """
    found = []
    for one in trace.asked:
        assert one.started_s >= one.arrived_s, "every request is sent in the end"
        aged_s = one.arrived_s + AGE_S + EPSILON_S
        if one.update or one.started_s <= aged_s:
            continue
        there = [other for other in trace.asked if other.engine in one.able and not other.update]
        after = [other for other in there if aged_s < other.started_s < one.started_s]
        if any(other.arrived_s > one.arrived_s for other in after):
            found.append((one, "overtaken"))
        if by_places:
            left_s = sum(
                other.started_s + other.duration_s - aged_s
                for other in there
                if other.started_s <= aged_s < other.started_s + other.duration_s
            )
            ahead_s = sum(other.duration_s for other in after if other.arrived_s <= one.arrived_s)
            if (
                one.started_s
                > aged_s + (left_s + ahead_s) / (len(one.able) * trace.places) + EPSILON_S
            ):
                found.append((one, "too long"))
    return found


@pytest.mark.parametrize("through", [through_the_router, through_sglang])
def test_no_request_waits_longer_than_the_aging_bound(through: Callable[[Trace], None]) -> None:
    waited = 0
    for seed in range(TRACES):
        trace = drawn(seed)
        through(trace)
        by_places = through is through_sglang or trace.queue.max_running is not None
        assert not starved(trace, by_places=by_places), f"seed {seed}"
        waited += sum(one.started_s - one.arrived_s > AGE_S for one in trace.asked)
    assert waited > TRACES, "the search saw requests age"
