"""Traces as their readers get them: the list and the terminal."""

import asyncio

import pytest

from shell_router.api import ApiSettings
from shell_router.cli import main
from shell_router.errors import EngineUnreachable
from tests.fakes.api_server import api, chat
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script


def broken_script() -> ScriptedMoa:
    return ScriptedMoa({"small": Script("", error=EngineUnreachable("gone"))})


async def test_the_latest_requests_are_listed_by_model_status_and_time() -> None:
    now = [100.0]
    async with api(broken_script(), wall=lambda: now[0]) as served:
        for at_s, model in ((100.0, "duo"), (200.0, "medium"), (300.0, "small")):
            now[0] = at_s
            await served.post("/v1/chat/completions", chat(model=model))
        _, body = await served.get("/v1/traces")
        every = body["data"]
        listed = {
            query: [one["model"] for one in (await served.get(f"/v1/traces?{query}"))[1]["data"]]
            for query in ("model=duo", "status=failed", "status=finished", "since=200", "limit=1", "limit=0")
        }
    assert body["object"] == "list"
    assert [(one["model"], one["created"], one["status"], one["agents"]) for one in every] == [
        ("small", 300, "failed", 1),
        ("medium", 200, "finished", 1),
        ("duo", 100, "finished", 3),
    ]
    assert all(one["duration_ms"] >= 0 and one["id"] for one in every)
    assert listed == {
        "model=duo": ["duo"],
        "status=failed": ["small"],
        "status=finished": ["medium", "duo"],
        "since=200": ["small", "medium"],
        "limit=1": ["small"],
        "limit=0": [],
    }


@pytest.mark.parametrize("query", ["status=done", "limit=many", "limit=1001", "since=-1", "since=nan", "modle=duo"])
async def test_a_filter_that_cannot_be_meant_is_refused_by_name(query: str) -> None:
    async with api() as served:
        status, body = await served.get(f"/v1/traces?{query}")
    assert (status, body["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_tenant_sees_only_its_own_requests() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1", "you": "sk-2"})) as served:
        await served.post("/v1/chat/completions", chat(), Authorization="Bearer sk-1")
        counts = [
            len((await served.get("/v1/traces", Authorization=f"Bearer {key}"))[1]["data"]) for key in ("sk-1", "sk-2")
        ]
    assert counts == [1, 0]


async def test_the_command_lists_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    async with api() as served:
        async with served.stream(chat()) as response:
            await response.read()
            trace_id = response.headers["x-trace-id"]
        codes = [
            await asyncio.to_thread(main, ["trace", *arguments, "--url", served.url])
            for arguments in ([], [trace_id], ["--model", "nothing"], ["unknown"])
        ]
    assert codes == [0, 0, 0, 2]
    printed = capsys.readouterr()
    assert trace_id in printed.out
    assert "duo: finished" in printed.out
    assert "keeps no such request" in printed.out
    assert "No trace 'unknown' is held" in printed.err
