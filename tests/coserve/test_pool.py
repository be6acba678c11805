import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coserve.pool import (
    Component,
    ComponentPool,
    Costs,
    Event,
    GaveUp,
    Policies,
    Request,
    Switched,
    Tier,
)
from benchmarks.coserve.pool.errors import (
    ComponentError,
    ComponentFailed,
    ComponentTooLarge,
    UnknownComponent,
)
from benchmarks.coserve.pool.memory import two_stage
from benchmarks.coserve.pool.simulated import SimulatedComponents
from benchmarks.coserve.runs import POLICIES
from shell_router.errors import InvalidRequest
from shell_router.lab.simulation.virtual_time import run_virtual
from tests.coserve.fakes import COSTS, ScriptedExperts, component, executor

pytestmark = pytest.mark.slow


CATALOG = [
    component("a", 0.5),
    component("b", 0.4),
    component("c", 0.3),
    component("d", 0.2, after=("a", "b")),
]
Outcome = tuple[str, ...] | type[Exception]


def pool_of(
    components: ScriptedExperts,
    policies: Policies = POLICIES["ours"],
    *,
    room: int = 2,
    count: int = 1,
    **more: Any,
) -> ComponentPool:
    names = [f"gpu{number}" for number in range(count)]
    return ComponentPool(
        CATALOG, [executor(name, room) for name in names], components, policies, **more
    )


async def outcome(pool: ComponentPool, number: int, *chain: str) -> Outcome:
    try:
        answer = await pool.ask(Request(f"r{number}", chain, number))
    except ComponentError as error:
        return type(error)
    assert all(output == (name, number) for name, output in answer.outputs)
    return tuple(name for name, _ in answer.outputs)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return run_virtual(main())


async def all_of(pool: ComponentPool, *chains: str) -> list[Outcome]:
    return await asyncio.gather(
        *(outcome(pool, number, *chain) for number, chain in enumerate(chains))
    )


def test_every_expert_of_a_chain_answers_in_turn() -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts()) as pool:
            assert await all_of(pool, "ad", "c", "bd") == [("a", "d"), ("c",), ("b", "d")]

    run(main)


def test_the_most_probable_experts_are_there_before_the_first_request() -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts(), host_bytes=100) as pool:
            assert pool.loaded() == {"gpu0": ("a", "b"), Tier.HOST: ("c",)}

    run(main)


def test_requests_for_one_expert_share_batches_and_one_switch() -> None:
    async def main() -> None:
        components, events = ScriptedExperts(), list[Event]()
        async with pool_of(components, room=1, watch=events.append) as pool:
            await all_of(pool, *"abcabcabc")
        assert [(name, len(samples)) for name, samples in components.batches] == [
            ("a", 3),
            ("b", 3),
            ("c", 3),
        ]
        assert [event.component for event in events if isinstance(event, Switched)] == ["b", "c"]

    run(main)


def test_a_successor_leaves_first_only_while_none_of_its_predecessors_is_loaded() -> None:
    async def loaded_after(*chains: str) -> set[str]:
        catalog = [
            component("a", 0.3),
            component("b", 0.1),
            component("c", 0.05),
            component("d", 0.9, after=("a",)),
        ]
        policies = Policies(evict=two_stage, prefetch=0)
        async with ComponentPool(catalog, [executor(room=2)], ScriptedExperts(), policies) as pool:
            for number, chain in enumerate(chains):
                await outcome(pool, number, *chain)
            return set(pool.loaded()["gpu"])

    assert run(loaded_after) == {"d", "a"}
    assert run(lambda: loaded_after("b")) == {"d", "b"}  # with a there, d is judged by its usage
    assert run(lambda: loaded_after("b", "c")) == {
        "b",
        "c",
    }  # without it d leaves, however probable


def test_what_is_needed_next_is_loaded_while_something_runs() -> None:
    async def seconds(policies: Policies) -> float:
        loop = asyncio.get_running_loop()
        async with pool_of(ScriptedExperts(), policies) as pool:
            begun_s = loop.time()
            await all_of(pool, *"abaaaaac")
            return loop.time() - begun_s

    ours = run(lambda: seconds(Policies(prefetch=1)))
    late = run(lambda: seconds(Policies(prefetch=0)))
    assert ours < late


def test_what_is_here_runs_while_something_else_is_loaded_ahead() -> None:
    async def seconds(policies: Policies) -> float:
        loop, one = (
            asyncio.get_running_loop(),
            executor("gpu", 3, Costs(0.01, 0.02, 1, 1, 0.1, 2.0)),
        )
        catalog = [
            component("a", 0.9),
            component("b", 0.8),
            component("c", 0.7),
            component("x", 0.1, after=("a",)),
        ]
        async with ComponentPool(
            catalog, [one], SimulatedComponents([one], {"gpu": "cpu"}), policies
        ) as pool:
            begun_s, follows = loop.time(), asyncio.create_task(pool.ask(Request("ax", ("a", "x"))))
            await asyncio.sleep(0)
            await pool.ask(Request("b", ("b",)))
            took_s = loop.time() - begun_s
            await follows
            return took_s

    assert run(lambda: seconds(Policies(prefetch=1))) == run(lambda: seconds(Policies(prefetch=0)))


def test_what_is_known_to_follow_is_not_evicted_for_something_else_that_follows() -> None:
    async def main() -> None:
        slow, events = executor("gpu", 2, Costs(1.0, 20.0, 4, 1, 0.1, 0.5)), list[Event]()
        catalog = [
            component("a", 0.9),
            component("x", 0.2, after=("a",)),
            component("y", 0.1, after=("a",)),
        ]
        components = SimulatedComponents(
            [slow], {"gpu": "cpu"}, lambda name, sample: (name, sample)
        )
        async with ComponentPool(
            catalog, [slow], components, POLICIES["ours"], watch=events.append
        ) as pool:
            await all_of(pool, "ax", "ay")
        assert [event.component for event in events if isinstance(event, Switched)] == ["y"]

    run(main)


def test_what_runs_is_not_evicted_for_what_comes_next() -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts(), room=1) as pool:
            assert await all_of(pool, *"abcab") == [("a",), ("b",), ("c",), ("a",), ("b",)]

    run(main)


def test_what_comes_next_waits_where_the_samples_at_hand_take_the_room() -> None:
    async def main() -> None:
        catalog = [component("a", 0.5, memory_bytes=80), component("b", 0.4, memory_bytes=100)]
        only = executor("gpu", 1, Costs(0.01, 0.02, 4, 40, 0.1, 0.5), share=1.0)
        async with ComponentPool(catalog, [only], ScriptedExperts(), Policies()) as pool:
            assert await all_of(pool, *"aab") == [("a",), ("a",), ("b",)]
            assert pool.executors[0].memory.peak_bytes <= 200

    run(main)


def test_a_route_that_ends_a_request_leaves_the_rest_of_its_chain_out() -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts(), route=lambda *_: None) as pool:
            assert await outcome(pool, 1, "a", "d") == ("a",)

    run(main)


def test_a_route_may_lead_to_an_expert_that_no_chain_named_and_give_it_what_it_likes() -> None:
    def route(request: Request, name: str, output: Any) -> tuple[str, Any] | None:
        return ("d", "other") if name == "a" else None

    async def main() -> None:
        async with pool_of(ScriptedExperts(), route=route) as pool:
            assert (await pool.ask(Request("r", ("a",)))).final == ("d", "other")

    run(main)


def test_a_corrupt_expert_costs_only_its_own_requests(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts(corrupt="ac")) as pool:
            found = await all_of(pool, "a", "b", "c", "d", "bd", "ad", "c")
            assert pool.executors[0].memory.used_bytes <= 200
        assert found == [
            ComponentFailed,
            ("b",),
            ComponentFailed,
            ("d",),
            ("b", "d"),
            ComponentFailed,
            ComponentFailed,
        ]

    run(main)
    assert "a could not be loaded on gpu0: the file is cut off." in caplog.text


def test_a_component_that_is_given_up_is_reported_to_the_watch() -> None:
    async def main() -> list[GaveUp]:
        events = list[Event]()
        async with pool_of(ScriptedExperts(corrupt="c"), watch=events.append) as pool:
            await all_of(pool, "c", "b", "c", "a")
        return [event for event in events if isinstance(event, GaveUp)]

    (gave_up,) = run(main)
    assert (gave_up.executor, gave_up.component, gave_up.requests) == ("gpu0", "c", 2)
    assert "cut off" in str(gave_up.error) and gave_up.at_s > 0


def test_a_sample_that_an_expert_refuses_costs_that_request_alone() -> None:
    class Refusing(ScriptedExperts):
        async def run(
            self, component: Component, place: str, samples: Sequence[Any]
        ) -> Sequence[Any]:
            outputs = await super().run(component, place, samples)
            return [
                ComponentError("odd") if sample % 2 else output
                for sample, output in zip(samples, outputs, strict=True)
            ]

    async def main() -> None:
        async with pool_of(Refusing()) as pool:
            assert await all_of(pool, *"aaa") == [("a",), ComponentError, ("a",)]

    run(main)


def test_an_expert_that_fails_on_its_batch_costs_that_batch() -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts(broken="b")) as pool:
            assert await all_of(pool, *"abcb") == [("a",), ComponentFailed, ("c",), ComponentFailed]
            assert pool.asked == 0

    run(main)


def test_an_expert_larger_than_any_budget_is_refused_before_anything_runs() -> None:
    async def main() -> None:
        catalog = [*CATALOG, component("huge", 1.0, memory_bytes=201)]
        async with ComponentPool(catalog, [executor()], ScriptedExperts(), Policies()) as pool:
            with pytest.raises(ComponentTooLarge, match="memory_bytes"):
                await pool.ask(Request("r", ("a", "huge")))
            assert await outcome(pool, 1, "a") == ("a",)

    run(main)


def test_unknown_experts_and_ids_in_use_are_refused() -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts()) as pool:
            with pytest.raises(UnknownComponent):
                await pool.ask(Request("r", ("x",)))
            first = asyncio.create_task(outcome(pool, 1, "a"))
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequest, match="being served"):
                await pool.ask(Request("r1", ("b",)))
            assert await first == ("a",)

    run(main)


def test_a_cancelled_request_leaves_nothing_and_its_batch_goes_on() -> None:
    async def main() -> None:
        components = ScriptedExperts()
        async with pool_of(components, room=1) as pool:
            tasks = [
                asyncio.create_task(outcome(pool, number, name))
                for number, name in enumerate("aabb")
            ]
            await asyncio.sleep(0.05)  # the batch of a runs
            tasks[0].cancel()
            tasks[2].cancel()
            tasks[3].cancel()
            assert await tasks[1] == ("a",)
            assert (pool.asked, len(pool.executors[0].queue)) == (0, 0)
            again = asyncio.create_task(outcome(pool, 0, "b"))
            assert await again == ("b",)
        assert components.batches == [("a", (0, 1)), ("b", (0,))]

    run(main)


def test_an_answer_of_a_cancelled_request_is_not_taken_for_one_of_the_same_id() -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts()) as pool:
            first = asyncio.create_task(pool.ask(Request("r", ("a",), "old")))
            await asyncio.sleep(0.05)
            first.cancel()
            await asyncio.sleep(0)
            assert (await pool.ask(Request("r", ("a",), "new"))).final == ("a", "new")

    run(main)


def test_a_closed_pool_has_unloaded_everything_and_fails_waiting_requests() -> None:
    async def main() -> None:
        components = ScriptedExperts()
        async with pool_of(components, host_bytes=300) as pool:
            waiting = asyncio.create_task(outcome(pool, 1, "c"))
            await asyncio.sleep(0.2)
        assert await waiting is ComponentError
        assert components.loaded == set()
        assert pool.host_memory.used_bytes == pool.executors[0].memory.used_bytes == 0

    run(main)


def test_an_error_of_who_uses_the_pool_stays_what_it_is() -> None:
    async def main() -> None:
        async with pool_of(ScriptedExperts()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main)


def test_a_defect_that_ends_a_pool_is_logged_at_once_and_fails_later_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def watch(event: Event) -> None:
        raise ZeroDivisionError("in the watch")

    async def main() -> None:
        messages = list[str]()
        with pytest.raises(ExceptionGroup):
            async with pool_of(ScriptedExperts(), watch=watch) as pool:
                for number in range(2):
                    with pytest.raises(ComponentError) as error:
                        await pool.ask(Request(f"r{number}", ("a",)))
                    messages.append(str(error.value))
                logged = caplog.text
        assert (
            messages
            == ["The pool was ended by a defect. Its log names it. Open the pool again."] * 2
        )
        assert "A defect ended the component pool" in logged and "in the watch" in logged

    run(main)


def test_a_pool_that_is_not_open_says_so() -> None:
    async def main() -> None:
        with pytest.raises(ComponentError, match="closed"):
            await pool_of(ScriptedExperts()).ask(Request("r", ("a",)))

    run(main)


def test_what_was_read_once_is_loaded_from_host_memory_afterwards() -> None:
    async def main() -> list[Tier]:
        events = list[Event]()
        async with pool_of(
            ScriptedExperts(), POLICIES["samba-coe"], room=1, host_bytes=200, watch=events.append
        ) as pool:
            for number, name in enumerate("dada"):
                await outcome(pool, number, name)
        return [event.tier for event in events if isinstance(event, Switched)]

    assert run(main) == [Tier.DISK, Tier.DISK, Tier.HOST, Tier.HOST]


def test_without_host_memory_all_comes_from_disk() -> None:
    async def main() -> None:
        components = ScriptedExperts()
        async with pool_of(components, room=1) as pool:
            await all_of(pool, *"abcd")
        assert {place for _, place in components.loads} == {"gpu0"}

    run(main)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Component], list[tuple[tuple[str, ...], float, bool]]]:
    """Components of mixed sizes, and requests with the pause before each and whether it is given
    up.
    """
    sizes = draw(st.lists(st.integers(30, 160), min_size=5, max_size=5))
    catalog = [
        component(name, 0.1, memory_bytes=size) for name, size in zip("abcd", sizes, strict=False)
    ]
    catalog.append(component("z", 0.3, ("a", "b"), sizes[-1]))
    chain = st.sampled_from([("a",), ("b",), ("c",), ("d",), ("a", "z"), ("b", "z")])
    return catalog, draw(st.lists(st.tuples(chain, st.floats(0, 0.3), st.booleans()), max_size=30))


@given(
    streams(),
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 3),
    st.sampled_from((0, 150, 500)),
    st.sampled_from((0.5, 1.0)),
)
def test_every_request_is_answered_once_and_no_budget_is_exceeded(
    stream: tuple[list[Component], list[tuple[tuple[str, ...], float, bool]]],
    policy: str,
    count: int,
    host_bytes: int,
    share: float,
) -> None:
    catalog, requests = stream
    costs = Costs(0.01, 0.02, 4, 40, 0.1, 0.5)
    executors = [
        executor(f"gpu{number}", 1 if share == 1 else 2, costs, share) for number in range(count)
    ]

    async def main() -> None:
        components = SimulatedComponents(
            executors, dict.fromkeys((one.name for one in executors), "gpu")
        )
        answered: Counter[int] = Counter()

        async def one(number: int, chain: tuple[str, ...]) -> None:
            answer = await pool.ask(Request(str(number), chain))
            assert tuple(name for name, _ in answer.outputs) == chain
            answered[number] += 1

        async with ComponentPool(
            catalog, executors, components, POLICIES[policy], host_bytes=host_bytes
        ) as pool:
            tasks = []
            for number, (chain, pause_s, _) in enumerate(requests):
                tasks.append(asyncio.create_task(one(number, chain)))
                await asyncio.sleep(pause_s)
                if requests[number // 2][2]:
                    tasks[number // 2].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [error for error in results if isinstance(error, Exception)] == []
            assert pool.asked == sum(len(each.queue) for each in pool.executors) == 0
        expected = {number for number, result in enumerate(results) if result is None}
        assert answered == dict.fromkeys(expected, 1)
        for memory in (pool.host_memory, *(each.memory for each in pool.executors)):
            assert memory.peak_bytes <= memory.budget_bytes
            assert memory.used_bytes == 0

    run(main)


def test_two_runs_in_virtual_time_are_the_same() -> None:
    def events_of_a_run() -> list[Event]:
        draw, events = random.Random(7), list[Event]()
        executors = [executor("gpu0"), executor("gpu1")]

        async def main() -> None:
            components = SimulatedComponents(executors, {"gpu0": "gpu", "gpu1": "gpu"})
            async with (
                ComponentPool(
                    CATALOG, executors, components, Policies(), host_bytes=100, watch=events.append
                ) as pool,
                asyncio.TaskGroup() as tasks,
            ):
                for number in range(100):
                    tasks.create_task(pool.ask(Request(str(number), (draw.choice("abcd"),))))
                    await asyncio.sleep(0.01)

        run(main)
        return events

    assert events_of_a_run() == events_of_a_run() != []


def test_simulated_experts_of_one_processor_share_it_and_read_one_disk() -> None:
    async def main() -> tuple[float, float]:
        executors = [executor("gpu0"), executor("gpu1")]
        components, loop = (
            SimulatedComponents(executors, {"gpu0": "gpu", "gpu1": "gpu"}),
            asyncio.get_running_loop(),
        )
        await asyncio.gather(
            components.load(CATALOG[0], "gpu0"), components.load(CATALOG[1], "gpu1")
        )
        loaded_s = loop.time()
        await asyncio.gather(
            components.run(CATALOG[0], "gpu0", [1]), components.run(CATALOG[1], "gpu1", [1])
        )
        return loaded_s, loop.time() - loaded_s

    loaded_s, ran_s = run(main)
    assert loaded_s == pytest.approx(
        2 * (COSTS.disk_load_s - COSTS.host_load_s) + COSTS.host_load_s
    )
    assert ran_s == pytest.approx(2 * COSTS.batch_seconds(1))
