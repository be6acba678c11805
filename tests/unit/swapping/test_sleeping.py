"""Models with servers of their own that sleep in turns: who is awake, and what clients that leave,
or failures, get.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import pytest

from benchmarks.scripted.run import ScriptedGpu
from benchmarks.scripted.server import BootstrapRooms, ScriptedServer, ScriptedSettings
from shell_router.core.engine import Finish, Generation
from shell_router.engines.address import PairAddress, PairLimits, ServerAddress
from shell_router.errors import EngineRejected, ModelFailed
from shell_router.http.tasks import TaskOwner
from shell_router.swapping.eviction import Eviction, ModelInTurn
from shell_router.swapping.kind import SwappedModel
from shell_router.swapping.leases import ModelLeases
from shell_router.swapping.places import Places, SleepingPair, SleepingPairs
from tests.fakes.scripted_pair import LIMITS, ONCE, until

NAMES = "abcdefgh"
CATALOG = {name: ModelInTurn(name, 1, 0.1) for name in NAMES}
LIMIT_S = 20.0
OWN_RID = re.compile(r"\b([a-h])\.\d+$")


@dataclass
class Model:
    """The prefill and the decode server of one model, each on a GPU that all models share."""

    prefill: ScriptedServer
    decode: ScriptedServer

    @property
    def servers(self) -> tuple[ScriptedServer, ScriptedServer]:
        return self.prefill, self.decode

    @property
    def awake(self) -> list[bool]:
        return [not server.memory.asleep for server in self.servers]

    def answered(self) -> list[str]:
        """The models that clients named in what decode got, probes aside."""
        rids = (orjson.loads(body)["rid"] for body in self.decode.bodies)
        return [found[1] for rid in rids if (found := OWN_RID.search(rid))]


@dataclass
class Router:
    """What one router has of the models; its clock stands still."""

    sleeping: SleepingPairs
    leases: ModelLeases
    tasks: TaskOwner
    models: Mapping[str, SwappedModel]

    async def asked(self, name: str, number: int = 0) -> int:
        """How many tokens the model answers with, of four."""
        request = Generation(f"{name}.{number}", (1, 2), {"max_new_tokens": 4})
        async with aclosing(self.models[name].generate(request)) as events:
            return sum([len(event.ids) async for event in events if not isinstance(event, Finish)])


@dataclass
class Machine:
    """All servers. All of them sleep at first, as `shell-router launch` leaves them."""

    models: Mapping[str, Model]
    places: int
    gpus: tuple[ScriptedGpu, ScriptedGpu]
    ports: Mapping[ScriptedServer, int] = field(default_factory=dict)

    def begin_restart(self, server: ScriptedServer) -> None:
        """End it, if it runs, and have it start: it takes memory, and does not answer yet."""
        server.memory.die("restarted")
        server.memory.begin()
        server.memory.gate.set()
        server.memory.gpu.taken += 1

    async def end_restart(self, server: ScriptedServer) -> None:
        """Have it answer at the same port: awake."""
        await server.start(self.ports[server])

    async def restart(self, server: ScriptedServer) -> None:
        self.begin_restart(server)
        await self.end_restart(server)

    @asynccontextmanager
    async def router(
        self, limits: PairLimits = LIMITS, launched: str = ""
    ) -> AsyncIterator[Router]:
        async with AsyncExitStack() as stack:
            pairs = {}
            for name, model in self.models.items():
                address = PairAddress(model.prefill.url, model.decode.url, "127.0.0.1", 8998)
                pairs[name] = pair = SleepingPair(address, limits=limits, retries=ONCE)
                stack.push_async_callback(pair.aclose)
            sleeping = SleepingPairs(pairs, LIMIT_S, launched)
            places, tasks = Places(sleeping.open), TaskOwner()
            leases = ModelLeases(
                places,
                tasks,
                lambda: 0.0,
                places=self.places,
                window_s=10.0,
                wait_s=60.0,
                order=Eviction(CATALOG),
            )
            models = {name: SwappedModel(name, leases, places, CATALOG) for name in self.models}
            yield Router(sleeping, leases, tasks, models)
            await tasks.aclose(0)

    @property
    def servers(self) -> list[ScriptedServer]:
        return [server for model in self.models.values() for server in model.servers]

    @property
    def died(self) -> list[str]:
        """Why servers ended: the router made a mistake."""
        return [server.memory.died for server in self.servers if server.memory.died]

    @property
    def awake(self) -> str:
        """The models of which a server is awake."""
        return "".join(name for name, model in self.models.items() if any(model.awake))


@asynccontextmanager
async def machine(
    names: str = NAMES[:3], places: int = 1, *, cpu_backup: bool = True
) -> AsyncIterator[Machine]:
    gpus = ScriptedGpu(places), ScriptedGpu(places)
    async with AsyncExitStack() as stack, asyncio.timeout(30):

        async def started(
            role: Literal["prefill", "decode"], rooms: BootstrapRooms
        ) -> ScriptedServer:
            settings = ScriptedSettings(
                role, log_bodies=10_000, memory_saver=True, cpu_backup=cpu_backup
            )
            server = await stack.enter_async_context(ScriptedServer(settings, rooms=rooms))
            server.memory.gpu = gpus[role == "decode"]
            server.memory.asleep, server.memory.version = True, "default (asleep)"
            server.memory.has_weights = cpu_backup
            return server

        models = {}
        for name in names:
            rooms = BootstrapRooms()
            models[name] = Model(await started("prefill", rooms), await started("decode", rooms))
        ports = {server: server.port for model in models.values() for server in model.servers}
        yield Machine(models, places, gpus, ports)


@pytest.mark.parametrize("cpu_backup", [True, False])
async def test_every_request_is_answered_by_its_own_model_and_no_more_are_awake_than_fit(
    *, cpu_backup: bool
) -> None:
    async with machine(NAMES, 3, cpu_backup=cpu_backup) as at, at.router() as router:
        asked = [(name, number) for number in range(16) for name in NAMES]
        assert await asyncio.gather(*(router.asked(*one) for one in asked)) == [4] * len(asked)
        assert at.died == []
        for name, model in at.models.items():
            assert model.answered() == [name] * 16
            once = ["wake"] if cpu_backup else ["wake", "read"]
            for server in model.servers:
                assert server.memory.changes in (once, [*once, "sleep"])
                assert server.memory.without_weights == 0
        assert [gpu.most for gpu in at.gpus] == [3, 3]
        assert router.leases.counts.loads.count == len(NAMES)
        assert not any(
            server.breaker.failures
            for pair in router.sleeping.pairs.values()
            for server in pair.fleet.servers
        )


async def test_undivided_servers_sleep_in_turns() -> None:
    settings = ScriptedSettings("null", memory_saver=True, cpu_backup=True)
    async with AsyncExitStack() as stack:
        servers = {}
        pairs = {}
        for name in "ab":
            servers[name] = server = await stack.enter_async_context(ScriptedServer(settings))
            server.memory.asleep, server.memory.version = True, "default (asleep)"
            pairs[name] = pair = SleepingPair(ServerAddress(server.url), limits=LIMITS)
            stack.push_async_callback(pair.aclose)
        sleeping = SleepingPairs(pairs, LIMIT_S, "")
        for name in "aba":
            async with sleeping.open(name) as engine:
                request = Generation(name, (1, 2), {"max_new_tokens": 4})
                assert [event async for event in engine.generate(request)]
                assert [other for other in "ab" if not servers[other].memory.asleep] == [name]
        assert not any(server.memory.died for server in servers.values())


async def test_a_client_that_leaves_while_its_model_wakes_leaves_nothing_behind_but_the_model() -> (
    None
):
    async with machine() as at, at.router() as router:
        decode = at.models["a"].decode.memory
        decode.gate.clear()
        leaving = asyncio.create_task(router.asked("a"))
        await until(lambda: at.models["a"].prefill.memory.version == "default")
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled() and router.leases.waiting == 0
        decode.gate.set()
        assert await router.asked("a", 1) == 4
        assert decode.changes == ["wake"]


async def test_a_router_that_ends_while_a_model_wakes_lets_it_finish_and_the_next_router_knows_what_is_awake() -> (
    None
):
    async with machine() as at:
        async with at.router() as router:
            memory = at.models["a"].decode.memory
            memory.gate.clear()
            waiting = asyncio.create_task(router.asked("a"))
            await until(lambda: memory.version.endswith("(unsettled)"))
            await router.tasks.aclose(0)
            memory.gate.set()
            waiting.cancel()
            await asyncio.wait([waiting])
        assert (memory.version, memory.asleep) == ("default", False)
        async with at.router() as router:
            assert [await router.asked(name) for name in "ba"] == [4, 4]
        assert at.died == [] and at.awake == "a"


async def test_a_server_that_dies_while_it_wakes_fails_its_own_requests_until_it_runs_again() -> (
    None
):
    async with machine() as at, at.router() as router:
        dying = at.models["b"].decode
        dying.memory.gate.clear()
        waiting = asyncio.create_task(router.asked("b"))
        await until(lambda: dying.memory.version.endswith("(unsettled)"))
        other = asyncio.create_task(router.asked("c"))
        dying.memory.die("killed")
        with pytest.raises(
            ModelFailed,
            match="The model 'b' could not be loaded: The decode engine cannot be reached",
        ):
            await waiting
        assert await other == 4
        with pytest.raises(ModelFailed):
            await router.asked("b", 1)
        assert await router.asked("a") == 4
        await at.restart(dying)
        assert await router.asked("c", 1) == 4
        assert at.awake == "c", "what restarted is awake, and has to sleep before another wakes"
        assert await router.asked("b", 2) == 4
        assert at.died == []


async def test_a_launched_server_takes_memory_before_it_answers_again_so_nothing_wakes_meanwhile() -> (
    None
):
    async with machine() as at, at.router(launched="b") as router:
        starting = at.models["b"].decode
        at.begin_restart(starting)
        words = (
            r"'c' could not be loaded: the engines of 'b' .* may hold GPU memory: The decode "
            r"engine cannot be"
        )
        with pytest.raises(ModelFailed, match=words):
            await router.asked("c")
        assert at.awake == "b" and at.died == []
        await at.end_restart(starting)
        assert await router.asked("c", 1) == 4
        assert at.awake == "c" and at.died == []


async def test_a_server_that_has_yet_to_warm_itself_up_is_not_put_to_sleep_before() -> None:
    async with machine() as at, at.router() as router:
        restarted = at.models["b"].decode
        await at.restart(restarted)
        restarted.memory.warm = False
        with pytest.raises(
            ModelFailed,
            match=r"'c' .* the engines of 'b' do not sleep.*: The decode engine is still starting",
        ):
            await router.asked("c")
        restarted.memory.warm_up()
        assert await router.asked("c", 1) == 4
        assert at.awake == "c" and at.died == []


async def test_a_model_that_refuses_to_sleep_keeps_its_memory_and_what_needs_it_says_so() -> None:
    async with machine("ab") as at, at.router() as router:
        assert await router.asked("a") == 4
        at.models["a"].decode.memory.refuses["sleep"] = "not today"
        with pytest.raises(
            ModelFailed, match=r"'b' could not be loaded: .* 'a' do not sleep, .*not today"
        ):
            await router.asked("b")
        assert await router.asked("a", 1) == 4, "what did not sleep serves without waking"
        at.models["a"].decode.memory.refuses.clear()
        assert await router.asked("b", 1) == 4
        assert at.died == [] and at.awake == "b"


async def test_a_server_that_is_still_busy_is_put_to_sleep_when_it_is_idle_and_not_before() -> None:
    async with machine("ab") as at, at.router() as router:
        assert await router.asked("a") == 4
        at.models["a"].prefill.memory.busy = 3
        assert await router.asked("b") == 4
        assert at.died == [] and at.awake == "b"


async def test_a_server_that_stays_busy_stays_awake_and_what_needs_its_memory_fails() -> None:
    async with machine("ab") as at, at.router() as router:
        assert await router.asked("a") == 4
        router.sleeping.limit_s = 0.5
        at.models["a"].prefill.memory.busy = 10**9
        with pytest.raises(
            ModelFailed, match=r"'a' do not sleep, .*: The prefill engine did not drop its KV"
        ):
            await router.asked("b")
        at.models["a"].prefill.memory.busy = 0
        router.sleeping.limit_s = LIMIT_S
        assert await router.asked("b", 1) == 4
        assert at.died == []


async def test_a_server_that_does_not_wake_in_time_is_left_alone_and_nothing_wakes_until_it_was_restarted() -> (
    None
):
    async with machine("ab") as at, at.router() as router:
        at.models["a"].decode.memory.gate.clear()
        router.sleeping.limit_s = 0.2
        with pytest.raises(
            ModelFailed, match=r"'a' could not be loaded: The \w+ engine sent nothing"
        ):
            await router.asked("a")
        router.sleeping.limit_s = LIMIT_S
        for name in "ab":
            with pytest.raises(
                ModelFailed, match=r"was left halfway between sleeping and waking.* Restart it\."
            ):
                await router.asked(name, 1)
        for server in at.models["a"].servers:
            await at.restart(server)
        assert [await router.asked(name, 2) for name in "ba"] == [4, 4]
        assert at.died == [] and at.awake == "a"


async def test_weights_that_cannot_be_read_leave_a_server_that_reads_them_at_the_next_wake() -> (
    None
):
    async with machine("ab", cpu_backup=False) as at, at.router() as router:
        memory = at.models["a"].decode.memory
        memory.refuses["read"] = "Cannot find any model weights"
        with pytest.raises(
            ModelFailed, match=r"'a' could not be loaded: .*Cannot find any model weights"
        ):
            await router.asked("a")
        assert memory.version == "default (without weights)"
        memory.refuses.clear()
        assert [await router.asked(name, 1) for name in "aba"] == [4] * 3
        assert memory.changes == ["wake", "read", "sleep", "wake", "read"]
        assert at.died == [] and memory.without_weights == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory_saver": False}, "--enable-memory-saver"),
        ({"memory_saver": True, "device": "cpu"}, "on a GPU"),
    ],
)
async def test_a_server_that_cannot_sleep_is_refused_at_the_start_and_nothing_is_asked_of_it(
    settings: dict[str, Any], words: str
) -> None:
    async with machine("a") as at, at.router() as router:
        decode = at.models["a"].decode
        decode.settings = ScriptedSettings(role="decode", **settings)
        await router.sleeping.pairs["a"].fleet.ready()
        with pytest.raises(EngineRejected, match="The decode engine cannot sleep") as refused:
            await router.sleeping.pairs["a"].fleet.probe()
        assert words in str(refused.value.remedy)
        assert at.died == [] and at.awake == ""
