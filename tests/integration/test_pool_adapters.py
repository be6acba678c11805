"""Adapters on scripted pairs, by the router's own client: loaded, shared, unloaded, lost and
found."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from benchmarks.scripted.server import Fault, ScriptedSettings
from shell_router.core.engine import Generation
from shell_router.engines.sglang import random_rid
from shell_router.errors import (
    AdapterFailed,
    AdapterMissing,
    EngineRejected,
    EngineStalled,
    InvalidRequest,
)
from shell_router.routing.adapter_cache import AdapterSettings
from tests.fakes.adapters import write_adapters
from tests.fakes.scripted_pair import ScriptedPool, collect, scripted_pool, until

NAMES = ("algebra", "biology", "chemistry", "drama")
SERVERS = ScriptedSettings(max_loaded_adapters=2)
ON = {"max_new_tokens": 8, "temperature": 0}


@asynccontextmanager
async def adapted(
    folder: Path,
    servers: ScriptedSettings = SERVERS,
    prefills: int = 1,
    decodes: int = 1,
    room: int = 2,
) -> AsyncIterator[ScriptedPool]:
    adapters = AdapterSettings(write_adapters(folder, NAMES), max_loaded_adapters=room)
    async with scripted_pool(prefills, decodes, servers, adapters=adapters) as at:
        yield at


def asked(adapter: str | None, prompt_tokens: int = 40) -> Generation:
    return Generation(random_rid(), list(range(1, prompt_tokens + 1)), ON, adapter=adapter)


async def output(at: ScriptedPool, adapter: str | None) -> tuple[int, ...]:
    tokens, _ = await collect(at.pool, asked(adapter))
    return tuple(token for event in tokens for token in event.ids)


def loads(at: ScriptedPool) -> list[int]:
    return [server.adapters.loads for server in (*at.prefills, *at.decodes)]


async def test_every_adapter_answers_as_when_it_is_served_alone_and_no_server_holds_more_than_its_room(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path, replace(SERVERS, token_s=0.001, adapter_load_s=0.002)) as at:
        alone = {name: await output(at, name) for name in (None, *NAMES)}
        assert len(set(alone.values())) == len(NAMES) + 1
        order = [(None, *NAMES)[(7 * number) % 5] for number in range(100)]
        assert await asyncio.gather(*(output(at, name) for name in order)) == [
            alone[name] for name in order
        ]
        assert [server.adapters.most for server in (*at.prefills, *at.decodes)] == [2, 2]
        await at.idle()


async def test_requests_for_one_adapter_load_it_once_on_each_server(tmp_path: Path) -> None:
    async with adapted(tmp_path, replace(SERVERS, adapter_load_s=0.01)) as at:
        await asyncio.gather(*(output(at, "algebra") for _ in range(20)))
        assert loads(at) == [1, 1]


async def test_prefill_only_requests_warm_the_adapters_own_prefix(tmp_path: Path) -> None:
    async with adapted(tmp_path) as at:
        assert (await at.pool.prefill(asked("algebra", 40))).cached_tokens == 0
        assert (await at.pool.prefill(asked("biology", 40))).cached_tokens == 0
        _, finish = await collect(at.pool, asked("algebra", 60))
        assert finish.cached_tokens == 40
        assert at.decodes[0].adapters.loads == 1


async def test_prefill_only_by_a_pair_carries_the_adapter_too(tmp_path: Path) -> None:
    async with adapted(tmp_path, replace(SERVERS, warms=())) as at:
        await at.pool.probe()
        assert at.pool.prefill_ways == ("pair",)
        await at.pool.prefill(asked("algebra", 40))
        _, finish = await collect(at.pool, asked("algebra", 60))
        assert finish.cached_tokens == 40


async def test_a_corrupt_adapter_costs_its_own_requests_and_is_tried_again_when_asked_for(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path) as at:
        config = tmp_path / "drama" / "adapter_config.json"
        whole = config.read_text()
        config.write_text(whole[:10])
        answers = await asyncio.gather(
            *(output(at, name) for name in NAMES), return_exceptions=True
        )
        assert [type(one) for one in answers] == [tuple, tuple, tuple, AdapterFailed]
        assert "drama" in str(answers[3]) and str(config.parent) in str(answers[3])
        config.write_text(whole)
        assert len(await output(at, "drama")) == 8
        assert at.pool.retried == 0


async def test_an_adapter_that_only_prefill_cannot_load_leaves_its_place_on_decode(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path, replace(SERVERS, max_loaded_adapters=1), room=1) as at:
        at.prefills[0].settings = replace(at.prefills[0].settings, max_loaded_adapters=0)
        with pytest.raises(AdapterFailed):
            await output(at, "algebra")
        at.prefills[0].settings = replace(at.prefills[0].settings, max_loaded_adapters=1)
        async with asyncio.timeout(5):
            assert len(await output(at, "biology")) == 8


async def test_while_one_adapter_decodes_prefill_takes_another(tmp_path: Path) -> None:
    async with adapted(tmp_path, replace(SERVERS, max_loaded_adapters=1, token_s=60), room=1) as at:
        decoding = asyncio.create_task(output(at, "algebra"))
        await until(lambda: at.decodes[0].running and not at.prefills[0].running)
        async with asyncio.timeout(5):
            await at.pool.prefill(asked("biology"))
        decoding.cancel()
        await asyncio.wait([decoding])


async def test_a_rank_that_the_servers_refuse_is_reported_in_their_words(tmp_path: Path) -> None:
    async with adapted(tmp_path) as at:
        (tmp_path / "drama" / "adapter_config.json").write_text('{"r": 65}')
        with pytest.raises(AdapterFailed, match="rank 65 is incompatible"):
            await output(at, "drama")


async def test_servers_that_take_no_adapters_say_so(tmp_path: Path) -> None:
    async with adapted(tmp_path, ScriptedSettings()) as at:
        with pytest.raises(AdapterFailed, match="--enable-lora"):
            await output(at, "algebra")
        assert len(await output(at, None)) == 8
        with pytest.raises(
            EngineRejected, match=r"takes no adapters\. Start it with --enable-lora"
        ):
            await at.pool.probe()


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
async def test_adapters_that_a_restarted_server_lost_are_loaded_again(
    tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with adapted(tmp_path) as at:
        before = await output(at, "algebra")
        lost = {"prefill": at.prefills, "decode": at.decodes, "both": (*at.prefills, *at.decodes)}[
            role
        ]
        for server in lost:
            server.adapters.loaded.clear()
        assert await output(at, "algebra") == before
        missing = [at.pool.adapters.leases[server].counts.missing for server in at.pool.servers]
        assert missing == {"prefill": [1, 0], "decode": [0, 1], "both": [1, 1]}[role]
        assert "has lost the adapter 'algebra'" in caplog.text
        assert not any(at.breakers())


async def test_a_lost_adapter_is_noticed_by_prefill_only_requests(tmp_path: Path) -> None:
    async with adapted(tmp_path) as at:
        await at.pool.prefill(asked("algebra"))
        at.prefills[0].adapters.loaded.clear()
        with pytest.raises(Exception, match="does not have the adapter"):
            await at.pool.prefill(asked("algebra"))
        await at.pool.prefill(asked("algebra"))
        assert at.prefills[0].adapters.loads == 2


async def test_adapters_of_an_earlier_router_are_unloaded_and_foreign_ones_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with adapted(tmp_path, replace(SERVERS, max_loaded_adapters=3)) as at:
        await output(at, "algebra")
        await output(at, "biology")
        other = write_adapters(tmp_path / "others", ["other"])["other"]
        server = at.pool.servers[0]
        await server.post(
            "load_lora_adapter",
            orjson.dumps({"lora_name": "other", "lora_path": str(other)}),
            limit_s=5,
        )
        await at.pool.probe()
        assert [set(one.adapters.loaded) for one in (*at.prefills, *at.decodes)] == [
            {"other"},
            set(),
        ]
        assert "['other']" in caplog.text


async def test_an_adapter_that_was_loaded_meanwhile_is_used_as_it_is(tmp_path: Path) -> None:
    async with adapted(tmp_path) as at:
        before = await output(at, "algebra")
    async with adapted(tmp_path / "again") as at:
        body = orjson.dumps(
            {"lora_name": "algebra", "lora_path": str(tmp_path / "again" / "algebra")}
        )
        for server in at.pool.servers:
            await server.post("load_lora_adapter", body, limit_s=5)
        assert await output(at, "algebra") == before
        assert loads(at) == [1, 1]


async def test_an_adapter_that_was_not_unloaded_in_time_is_unloaded_before_the_next_load(
    tmp_path: Path,
) -> None:
    settings = replace(SERVERS, max_loaded_adapters=1)
    adapters = AdapterSettings(write_adapters(tmp_path, NAMES), load_s=0.05)
    async with scripted_pool(settings=settings, adapters=adapters) as at:
        await output(at, "algebra")
        stuck = at.decodes[0].adapters
        stuck.loaded["algebra"].running += 1  # a request that the server does not let go of
        await output(at, "biology")
        assert stuck.unloads == ["algebra", "algebra"]


async def test_an_adapter_that_loaded_too_late_is_unloaded_before_the_next_load(
    tmp_path: Path,
) -> None:
    settings = replace(SERVERS, max_loaded_adapters=1, adapter_load_s=0.2)
    adapters = AdapterSettings(write_adapters(tmp_path, NAMES), load_s=0.05)
    async with scripted_pool(settings=settings, adapters=adapters) as at:
        with pytest.raises(EngineStalled):
            await output(at, "algebra")
        decode = at.decodes[0]
        await until(lambda: "algebra" in decode.adapters.loaded)
        await until(lambda: not any(server.adapters.loading for server in at.prefills))
        for server in (*at.prefills, decode):
            server.settings = replace(server.settings, adapter_load_s=0.0)
        assert len(await output(at, "biology")) == 8
        assert decode.adapters.unloads == ["algebra"]


async def test_a_refusal_is_known_by_its_words_and_not_by_the_name_of_a_folder(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path / "already-trained") as at:
        (tmp_path / "already-trained" / "drama" / "adapter_config.json").unlink()
        with pytest.raises(AdapterFailed, match="No such file"):
            await output(at, "drama")


async def test_an_unreachable_server_is_not_waited_for_and_another_takes_the_request(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path, decodes=2) as at:
        await at.decodes[0].stop()
        for _ in range(3):
            assert len(await output(at, "algebra")) == 8
        assert at.pool.retried
        await at.decodes[0].start()


async def test_with_several_servers_each_adapter_keeps_to_those_that_have_it(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path, replace(SERVERS, token_s=0.001), prefills=2, decodes=2) as at:
        for _ in range(5):
            await asyncio.gather(*(output(at, name) for name in NAMES))
        assert loads(at) == [2, 2, 2, 2]


async def test_a_failed_attempt_gives_its_leases_back(tmp_path: Path) -> None:
    async with adapted(tmp_path, room=1, servers=replace(SERVERS, max_loaded_adapters=1)) as at:
        at.strike(Fault("status", status=400), *at.decodes)
        with pytest.raises(EngineRejected):
            await output(at, "algebra")
        at.strike(None, *at.decodes)
        assert len(await output(at, "biology")) == 8


@pytest.mark.parametrize("turns", range(0, 100, 5))
async def test_a_request_cancelled_at_any_moment_gives_its_leases_back(
    tmp_path: Path, turns: int
) -> None:
    async with adapted(
        tmp_path, replace(SERVERS, token_s=0.05, max_loaded_adapters=1), room=1
    ) as at:
        task = asyncio.create_task(output(at, "algebra"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        at.decodes[0].settings = replace(at.decodes[0].settings, token_s=0.0)
        assert len(await output(at, "biology")) == 8
        await at.idle()


async def test_native_requests_are_answered_by_the_adapter_of_the_model_they_name(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path) as at:
        expected = await output(at, "algebra")
        body = orjson.dumps(
            {"input_ids": list(range(1, 41)), "sampling_params": ON, "stream": False}
        )
        for lost in (False, True):
            if lost:
                at.prefills[0].adapters.loaded.clear()
                at.decodes[0].adapters.loaded.clear()
            async with at.pool.forward("generate", body, adapter="algebra") as relayed:
                found = orjson.loads(b"".join([chunk async for chunk in relayed.chunks]))
            assert tuple(found["output_ids"]) == expected
        async with at.pool.forward("prefill_only", body, adapter="algebra") as relayed:
            assert relayed.status == 200


async def test_a_native_stream_whose_adapter_is_lost_begins_again(tmp_path: Path) -> None:
    async with adapted(tmp_path) as at:
        expected = await output(at, "algebra")
        at.prefills[0].adapters.loaded.clear()
        at.decodes[0].adapters.loaded.clear()
        body = orjson.dumps(
            {"input_ids": list(range(1, 41)), "sampling_params": ON, "stream": True}
        )
        async with at.pool.forward("generate", body, adapter="algebra") as relayed:
            text = b"".join([chunk async for chunk in relayed.chunks])
        ids = [
            token
            for line in text.split(b"\n\n")
            if line.startswith(b"data: {")
            for token in orjson.loads(line[6:])["output_ids"]
        ]
        assert tuple(ids) == expected


async def test_a_native_prefill_notices_that_its_adapter_is_lost(tmp_path: Path) -> None:
    async with adapted(tmp_path) as at:
        body = orjson.dumps({"input_ids": list(range(1, 41))})
        statuses = []
        for lost in (False, True, False):
            if lost:
                at.prefills[0].adapters.loaded.clear()
            try:
                async with at.pool.forward("prefill_only", body, adapter="algebra") as relayed:
                    statuses.append(relayed.status)
            except AdapterMissing:
                statuses.append(0)
        assert statuses == [200, 0, 200]


async def test_a_native_body_may_not_name_an_adapter_that_the_router_would_not_load(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path) as at:
        with pytest.raises(InvalidRequest, match="lora_path"):
            async with at.pool.forward("generate", b'{"input_ids": [1], "lora_path": "algebra"}'):
                pass


async def test_the_wait_for_an_adapter_is_part_of_the_placement(tmp_path: Path) -> None:
    async with adapted(
        tmp_path, replace(SERVERS, token_s=0.01, max_loaded_adapters=1), room=1
    ) as at:
        placed = []
        request = replace(asked("biology"), on_placed=lambda *one: placed.extend(one))
        first = asyncio.create_task(collect(at.pool, asked("algebra")))
        await until(lambda: at.decodes[0].running == 1)
        second = asyncio.create_task(collect(at.pool, request))
        await until(lambda: any(one.waiting for one in at.pool.adapters.leases.values()))
        at.now_s = 3.0
        await asyncio.gather(first, second)
        assert [(one.engine, one.adapter_s) for one in placed] == [
            ("prefill-0", 0.0),
            ("decode-0", 3.0),
        ]
