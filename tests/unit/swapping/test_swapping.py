"""Models that take turns: which leaves, what is loaded ahead, and what clients that race, leave or
fail get.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from shell_router.core.engine import Engine, Finish, Generation, Hints
from shell_router.errors import EngineUnavailable, ModelFailed, WeightsLost
from shell_router.http.tasks import TaskOwner
from shell_router.swapping.eviction import Eviction, ModelInTurn, models_in_turn
from shell_router.swapping.kind import SwappedModel
from shell_router.swapping.leases import ModelLeases
from shell_router.swapping.metrics import TurnMetrics
from shell_router.swapping.places import Places
from shell_router.swapping.turns import LoadedModel
from shell_router.topology import Graph, load_topology
from tests.fakes.moa import WordTokenizer
from tests.fakes.scripted_engine import Hold, Script, ScriptedEngine
from tests.fakes.scripted_pair import until

NAMES = "abcdefgh"
CATALOG = {name: ModelInTurn(name, 1, 0.1) for name in NAMES}


class FakeEngines:
    """Loads when `gate` is open; raises `errors` instead. `most` is the most models that were
    loaded at a time.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: dict[str, OSError] = {}
        self.engines: dict[str, ScriptedEngine] = {}
        self.lost: set[str] = set()
        self.hold: Hold | None = None
        self.loads: list[str] = []
        self.most = 0

    @asynccontextmanager
    async def open(self, alias: str) -> AsyncIterator[Engine]:
        self.loads.append(alias)
        await self.gate.wait()
        if alias in self.errors:
            raise self.errors[alias]
        pace = {"pace": self.hold.pace} if self.hold else {}

        def says(_: Generation) -> Script:
            lost = WeightsLost("The weights are gone.") if alias in self.lost else None
            self.lost.discard(alias)
            return Script(f"{alias} says so", error=lost)

        self.engines[alias] = ScriptedEngine(WordTokenizer(), says, **pace)
        self.most = max(self.most, len(self.engines))
        yield self.engines[alias]
        await asyncio.sleep(0)
        assert not self.engines.pop(alias).running


@dataclass
class Group:
    """The models, what loads them, and a clock that stands still."""

    places: FakeEngines
    leases: ModelLeases
    models: Mapping[str, SwappedModel]

    async def asked(self, name: str, number: int = 0, topology: str | None = None) -> str:
        request = Generation(f"{name}.{number}", (1, 2), hints=Hints(topology=topology))
        async with aclosing(self.models[name].generate(request)) as events:
            return "".join([event.text async for event in events if not isinstance(event, Finish)])


@asynccontextmanager
async def group(
    loaded: int = 3, catalog: Mapping[str, ModelInTurn] = CATALOG, wait_s: float = 60.0
) -> AsyncIterator[Group]:
    engines, tasks = FakeEngines(), TaskOwner()
    places = Places(engines.open)
    leases = ModelLeases(
        places,
        tasks,
        lambda: 0.0,
        places=loaded,
        window_s=10.0,
        wait_s=wait_s,
        order=Eviction(catalog),
    )
    yield Group(
        engines, leases, {name: SwappedModel(name, leases, places, catalog) for name in catalog}
    )
    await tasks.aclose(0)


async def test_every_request_is_answered_by_its_own_model_and_no_more_are_loaded_than_fit() -> None:
    async with group() as at, asyncio.timeout(30):
        asked = [(name, number) for number in range(16) for name in NAMES]
        found = await asyncio.gather(*(at.asked(*one) for one in asked))
        assert found == [f"{name} says so" for name, _ in asked]
        assert (at.places.most, len(at.places.loads)) == (3, len(NAMES))


async def test_two_that_race_for_the_last_place_are_both_answered_one_after_the_other() -> None:
    async with group(loaded=2) as at, asyncio.timeout(30):
        at.places.hold = Hold()
        running = asyncio.create_task(at.asked("a"))
        await until(lambda: "a" in at.places.engines and at.places.engines["a"].running)
        racing = [asyncio.create_task(at.asked(name)) for name in "bc"]
        await until(lambda: at.leases.waiting == 1)
        assert at.places.loads == ["a", "b"]
        at.places.hold.release()
        assert await asyncio.gather(running, *racing) == ["a says so", "b says so", "c says so"]
        assert at.places.most == 2


async def test_a_client_that_leaves_while_its_model_loads_leaves_nothing_behind_but_the_model() -> (
    None
):
    async with group() as at, asyncio.timeout(30):
        at.places.gate.clear()
        leaving = asyncio.create_task(at.asked("a"))
        await until(lambda: at.places.loads)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled() and at.leases.waiting == 0
        at.places.gate.set()
        assert await at.asked("a") == "a says so"
        assert at.places.loads == ["a"]


async def test_a_load_that_fails_fails_its_own_requests_and_is_tried_again_for_the_next() -> None:
    async with group() as at, asyncio.timeout(30):
        at.places.errors["b"] = OSError("The file is cut off.")
        found = await asyncio.gather(*map(at.asked, "abc"), return_exceptions=True)
        assert isinstance(found[1], ModelFailed) and "cut off" in str(found[1])
        assert found[::2] == ["a says so", "c says so"]
        at.places.errors.clear()
        assert await at.asked("b") == "b says so"


async def test_metrics_count_what_is_loaded_waits_and_fails() -> None:
    async with group(loaded=2) as at, asyncio.timeout(30):
        at.places.errors["b"] = OSError("The file is cut off.")
        await asyncio.gather(*map(at.asked, "abcd"), return_exceptions=True)
        at.places.gate.clear()
        waiting = asyncio.create_task(at.asked("e"))
        await until(lambda: "e" in at.places.loads)
        registry = CollectorRegistry()
        registry.register(TurnMetrics(at.leases))
        names = (
            "models_loaded",
            "model_requests_waiting",
            "model_load_failures_total",
            "model_load_seconds_count",
        )
        assert [registry.get_sample_value(f"shell_router_{name}") for name in names] == [1, 1, 1, 3]
        at.places.gate.set()
        assert await waiting == "e says so"


async def test_the_end_cuts_a_load_that_is_under_way() -> None:
    async with group() as at:
        at.places.gate.clear()
        waiting = asyncio.create_task(at.asked("a"))
        await until(lambda: at.places.loads)
    assert not at.places.engines
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_request_that_waits_too_long_says_what_to_raise() -> None:
    async with group(loaded=1, wait_s=0.01) as at, asyncio.timeout(30):
        at.places.gate.clear()
        with pytest.raises(EngineUnavailable, match="The model 'a' was still being loaded"):
            await at.asked("a")


async def test_weights_that_were_lost_are_loaded_again() -> None:
    async with group() as at, asyncio.timeout(30):
        assert await at.asked("a") == "a says so"
        at.places.lost.add("a")
        with pytest.raises(WeightsLost):
            await at.asked("a")
        assert await at.asked("a") == "a says so"
        assert at.places.loads == ["a", "a"]


async def test_the_reader_of_an_agents_output_is_loaded_ahead_in_place_of_a_model_without_requests() -> (
    None
):
    chain = {**CATALOG, "b": ModelInTurn("b", 1, after=frozenset("a"))}
    async with group(loaded=2, catalog=chain) as at, asyncio.timeout(30):
        await at.asked("c")
        at.places.hold = Hold()
        running = asyncio.create_task(at.asked("a", topology="chain"))
        await until(lambda: "b" in at.places.engines)
        assert not running.done() and set(at.places.engines) == {"a", "b"}
        at.places.hold.release()
        await running


async def test_nothing_is_loaded_ahead_while_others_wait_nor_later() -> None:
    chain = {**CATALOG, "b": ModelInTurn("b", 1, after=frozenset("a"))}
    async with group(loaded=2, catalog=chain) as at, asyncio.timeout(30):
        at.places.hold = Hold()
        running = [asyncio.create_task(at.asked(name)) for name in "ad"]
        await until(
            lambda: all(
                name in at.places.engines and at.places.engines[name].running for name in "ad"
            )
        )
        running.append(asyncio.create_task(at.asked("c")))
        await until(lambda: at.leases.waiting)
        running.append(asyncio.create_task(at.asked("a", 1, topology="chain")))
        await until(lambda: len(at.places.engines["a"].running) == 2)
        at.places.hold.release()
        await asyncio.gather(*running)
        assert await at.asked("c", 1) == "c says so"
        assert at.places.loads == ["a", "d", "c"]


async def test_a_prompt_is_prefilled_only_where_its_model_is_loaded_and_makes_others_wait_for_nothing() -> (
    None
):
    async with group(loaded=1) as at, asyncio.timeout(30):
        at.places.hold = Hold(first=0)
        running = asyncio.create_task(at.asked("a"))
        await until(lambda: "a" in at.places.engines)
        with pytest.raises(EngineUnavailable, match="not loaded"):
            await at.models["b"].prefill(Generation("p", (1, 2)))
        assert (await at.models["a"].prefill(Generation("p", (1, 2)))).prompt_tokens == 2
        at.places.hold.release()
        await running
        assert at.places.loads == ["a"]


def leaving(catalog: Mapping[str, ModelInTurn], *loaded: str, **turns: int) -> str:
    """The order in which these leave; they were used last in this order."""
    at = [LoadedModel(name, number) for number, name in enumerate(loaded)]
    return "".join(one.name for one in Eviction(catalog)(at, turns))


def test_successors_without_a_predecessor_leave_first_then_the_least_used_then_what_is_awaited() -> (
    None
):
    catalog = {
        "a": ModelInTurn("a", 1, usage=0.5),
        "b": ModelInTurn("b", 1, usage=0.1),
        "c": ModelInTurn("c", 2, usage=0.9, after=frozenset("x")),
        "d": ModelInTurn("d", 3, usage=0.9, after=frozenset("x")),
        "x": ModelInTurn("x", 1, usage=0.2),
    }
    assert leaving(catalog, "a", "b", "c", "d") == "dcba"
    assert leaving(catalog, "a", "b", "c", "d", "x") == "bxacd"
    assert leaving(catalog, "a", "b", "c", b=0, a=1) == "cab"
    assert leaving(CATALOG, "c", "a", "b") == "cab", "of equals, the one whose last use was first"


def test_a_model_comes_after_others_only_if_it_reads_their_outputs_wherever_it_is_named(
    tmp_path: Path,
) -> None:
    def graph(text: str) -> Graph:
        (tmp_path / "graph.yaml").write_text(text, encoding="utf-8")
        return load_topology(tmp_path / "graph.yaml", models=tuple("abc"))

    folders = {name: tmp_path / name for name in "abc"}
    for size, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"." * (size + 1))
    first = graph("name: one\nagents:\n  w: {model: a}\n  r: {model: b, precursors: [w]}\n")
    found = models_in_turn(folders, [first], {"b": 0.5})
    assert {name: (set(one.after), one.weight_bytes, one.usage) for name, one in found.items()} == {
        "a": (set(), 1, 0.0),
        "b": ({"a"}, 2, 0.5),
        "c": (set(), 3, 0.0),
    }
    second = graph("name: two\nagents:\n  w: {model: b}\n  r: {model: c, precursors: [w]}\n")
    found = models_in_turn(folders, [first, second], {})
    assert {name: set(one.after) for name, one in found.items()} == {
        "a": set(),
        "b": set(),
        "c": {"b"},
    }
