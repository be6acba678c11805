"""Spans over OTLP/HTTP: what a receiver gets of runs, and what engines get of spans."""

import asyncio
import json
import logging
import pickle
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource

from shell_router.core.spans import CURRENT, SpanContext
from shell_router.early_exit.settings import EarlyExit
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair
from shell_router.errors import EngineError
from shell_router.telemetry import TraceStore
from shell_router.telemetry.otlp import SpanExport, pickle_traces
from shell_router.telemetry.otlp_process import SCHEMA, spans_of
from shell_router.topology import Agent, Cluster, Prompt, Topology
from tests.fakes.api_server import api, chat, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.otlp_receiver import receiver
from tests.fakes.scripted_engine import Gates
from tests.fakes.scripted_pair import LIMITS, NEVER_OPEN, ONCE, collect, generation

CLIENT = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"}
UNSAMPLED = CLIENT["traceparent"][:-2] + "00"


@dataclass
class Asked:
    """The span that each engine request was sent in, by request id and by whether it prefills
    only."""

    generated: dict[str, SpanContext | None] = field(default_factory=dict)
    prefilled: list[SpanContext | None] = field(default_factory=list)

    async def pace(self, rid: str, piece: int) -> None:
        if piece < 0:
            self.prefilled.append(CURRENT.get())
        else:
            self.generated[rid.rpartition(".")[2]] = CURRENT.get()
        await asyncio.sleep(0)


def attributes(span: Span) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes
    }


async def test_a_runs_spans_arrive_in_its_clients_trace_with_parents_and_links() -> None:
    counts: Counter[str] = Counter()
    asked = Asked()
    async with receiver() as at:
        export = SpanExport(
            at.url, lambda outcome, count: counts.update({outcome: count}), linger_s=0
        )
        async with api(ScriptedMoa(pace=asked.pace), spans=export) as served:
            status, _ = await served.post("/v1/chat/completions", chat(), **CLIENT)
        await asyncio.to_thread(export.close, 60.0)
        found = at.spans
    assert status == 200
    (run,) = found["invoke_workflow duo"]
    agents = {name: found[f"invoke_agent {name}"][0] for name in ("left", "right", "root")}
    chats = {
        name: found[f"chat {model}"][0]
        for name, model in (("left", "small"), ("right", "medium"), ("root", "large"))
    }
    updates = found["prefill large"]
    every = [span for spans in found.values() for span in spans]
    assert {span.trace_id.hex() for span in every} == {"ab" * 16}
    assert {span.trace_state for span in every} == {"vendor=1"}
    assert run.parent_span_id.hex() == "cd" * 8
    assert {span.parent_span_id for span in agents.values()} == {run.span_id}
    assert {name: span.parent_span_id for name, span in chats.items()} == {
        n: s.span_id for n, s in agents.items()
    }
    assert {span.parent_span_id for span in updates} == {agents["root"].span_id}
    assert {link.span_id for link in agents["root"].links} == {
        agents["left"].span_id,
        agents["right"].span_id,
    }
    assert not agents["left"].links
    # what engines were asked belongs to these very spans
    engine_spans = {
        name: span.span_id for name, span in asked.generated.items() if span is not None
    }
    assert engine_spans == {name: span.span_id.hex() for name, span in chats.items()}
    assert [span.span_id for span in asked.prefilled if span] == [
        span.span_id.hex() for span in updates
    ]
    assert (run.status.code, chats["root"].status.code) == (Status.STATUS_CODE_OK, 0)
    kinds = [attributes(span)["openinference.span.kind"] for span in (run, agents["root"])]
    assert kinds == ["CHAIN", "AGENT"]
    assert attributes(chats["root"])["openinference.span.kind"] == "LLM"
    assert attributes(chats["root"])["gen_ai.operation.name"] == "chat"
    assert attributes(agents["root"])["gen_ai.agent.name"] == "root"
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in every)
    assert run.start_time_unix_nano <= min(span.start_time_unix_nano for span in every)
    assert counts == {"exported": len(every)}
    assert at.schemas == {SCHEMA}


@pytest.mark.parametrize("contents", [False, True])
async def test_spans_and_traces_have_texts_only_if_the_deployment_asks(contents: bool) -> None:
    async with receiver() as at:
        export = SpanExport(at.url, lambda outcome, count: None, linger_s=0)
        async with api(spans=export, traces=TraceStore(contents=contents)) as served:
            status, body = await served.post(
                "/v1/chat/completions",
                chat("Rain?", user="me"),
                **{"x-session-id": "child", "x-parent-session-id": "parent"},
            )
            _, listed = await served.get("/v1/traces")
            _, trace = await served.get(f"/v1/traces/{listed['data'][0]['id']}")
        await asyncio.to_thread(export.close, 60.0)
        (run,) = at.spans["invoke_workflow duo"]
        (chat_span,) = at.spans["chat large"]
    assert status == 200
    facts = attributes(run)
    assert facts["user.id"] != "me"
    assert (facts["session.id"], facts["shell_router.parent_session"]) == ("child", "parent")
    answer = body["choices"][0]["message"]["content"]
    expected = ("Rain?", answer) if contents else (None, None)
    assert (facts.get("input.value"), facts.get("output.value")) == expected
    root = trace["agents"]["root"]
    sent = attributes(chat_span)
    if not contents:
        assert "messages" not in root and "gen_ai.input.messages" not in sent
        return
    left, right = (trace["agents"][agent]["output"] for agent in ("left", "right"))
    (prompt,) = root["messages"]
    assert [piece["output_of"] for piece in prompt["content"] if isinstance(piece, dict)] == [
        "left",
        "right",
    ]
    assert root["output"] == answer
    assert trace["agents"]["left"]["messages"] == [{"role": "user", "content": "Rain?"}]
    read = [
        message["parts"][0]["content"]
        for message in json.loads(sent["gen_ai.input.messages"])
        if message["role"] == "assistant"
    ]
    assert read == [left, right]
    (written,) = json.loads(sent["gen_ai.output.messages"])
    assert written == {
        "role": "assistant",
        "parts": [{"type": "text", "content": answer}],
        "finish_reason": "stop",
    }


async def test_an_early_exit_is_a_span_of_its_run_that_links_the_agents_that_agreed() -> None:
    leaves = {name: Agent(name, "small") for name in "abc"}
    root = Agent("root", "large", tuple("abc"), Prompt(slot=" [{output}]"))
    cluster = Cluster("leaves", tuple("abc"), EarlyExit("in_flight", threshold=0.6))
    exiting = Topology(name="exiting", agents={**leaves, "root": root}, clusters=(cluster,))
    moa = ScriptedMoa(dict.fromkeys("ab", "2 plus 2 is 4 Answer: 4"), pace=Gates("c").pace)
    async with receiver() as at:
        export = SpanExport(at.url, lambda outcome, count: None, linger_s=0)
        async with api(moa, topologies=(exiting,), spans=export) as served:
            status, _ = await served.post("/v1/chat/completions", chat(model="exiting"))
        await asyncio.to_thread(export.close, 60.0)
        found = at.spans
    assert status == 200
    (run,), scored = found["invoke_workflow exiting"], found["early_exit leaves"]
    exit_ = scored[-1]
    facts = attributes(exit_)
    assert {span.parent_span_id for span in scored} == {run.span_id}
    agreed = {found[f"invoke_agent {name}"][0].span_id for name in "ab"}
    assert {link.span_id for link in exit_.links} == agreed
    assert facts["shell_router.exit.exited"] is True
    assert [one.string_value for one in facts["shell_router.exit.aborted"].values] == ["c"]
    assert 0.6 <= facts["shell_router.exit.probability"] <= 1
    assert (
        run.start_time_unix_nano
        <= exit_.start_time_unix_nano
        <= exit_.end_time_unix_nano
        <= run.end_time_unix_nano
    )


async def test_without_a_clients_span_the_trace_has_the_runs_id() -> None:
    async with api() as served:
        async with served.stream(chat()) as response:
            await response.read()
            run_id = response.headers["x-trace-id"]
        run, *_ = spans_of(served.services.traces.get("local", run_id), Resource.get_empty())
    assert (f"{run.context.trace_id:032x}", run.parent) == (run_id, None)


async def test_what_its_client_does_not_sample_is_not_exported_and_engines_see_the_clients_span() -> (
    None
):
    asked = Asked()
    async with receiver() as at:
        export = SpanExport(at.url, lambda outcome, count: None, linger_s=0)
        async with api(ScriptedMoa(pace=asked.pace), spans=export) as served:
            await served.post("/v1/chat/completions", chat(), traceparent=UNSAMPLED)
        await asyncio.to_thread(export.close, 60.0)
        assert at.requests == []
    assert {(span.span_id, span.flags) for span in asked.generated.values() if span} == {
        ("cd" * 8, 0)
    }


@pytest.mark.parametrize(
    ("headers", "span_id"), [(CLIENT, "cd" * 8), ({"traceparent": "00-0-0-01"}, None), ({}, None)]
)
async def test_a_router_that_exports_nothing_hands_the_clients_span_on(
    headers: dict[str, str], span_id: str | None
) -> None:
    asked = Asked()
    async with api(ScriptedMoa(pace=asked.pace)) as served:
        await served.post("/v1/chat/completions", chat(), **CLIENT)
        await served.post("/v1/chat/completions", chat(), **headers)
    assert {span.span_id if span else None for span in asked.generated.values()} == {span_id}


async def test_without_its_receiver_requests_go_on_and_one_line_of_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts: Counter[str] = Counter()
    async with receiver() as at:
        gone = at.url
    export = SpanExport(
        gone, lambda outcome, count: counts.update({outcome: count}), linger_s=0, limit_s=0.5
    )
    with caplog.at_level(logging.WARNING):
        async with api(spans=export) as served:
            answers = [await served.post("/v1/chat/completions", chat()) for _ in range(3)]
        await asyncio.to_thread(export.close, 60.0)
    assert [status for status, _ in answers] == [200] * 3
    assert counts["exported"] == 0 < counts["lost"]
    assert [line.message.partition(":")[0] for line in caplog.records] == ["spans are lost"]


@pytest.mark.slow
async def test_after_its_process_died_the_next_run_starts_another() -> None:
    counts: Counter[str] = Counter()
    async with receiver() as at:
        export = SpanExport(
            at.url, lambda outcome, count: counts.update({outcome: count}), linger_s=0
        )
        async with api(spans=export) as served:
            await served.post("/v1/chat/completions", chat())
            await until(lambda: counts["exported"] > 0)
            assert export._process is not None
            export._process.kill()
            await until(lambda: export._process is None or not export._process.running)
            await served.post("/v1/chat/completions", chat())
        await asyncio.to_thread(export.close, 60.0)
    assert counts["exported"] == sum(map(len, at.spans.values()))
    assert [
        len(spans) for name, spans in at.spans.items() if name.startswith("invoke_workflow")
    ] == [2]


async def test_runs_that_are_lost_are_counted_by_their_spans() -> None:
    async with api() as served:
        await served.post("/v1/chat/completions", chat())
        (trace,) = served.services.traces.latest("local", lambda _: True, 1)
    export = SpanExport("http://127.0.0.1:1/v1/traces", lambda outcome, count: None, linger_s=0)
    assert export._size(trace) == len(list(spans_of(trace, Resource.get_empty())))
    export.close()


async def test_the_spans_process_gets_the_traces_that_the_router_has() -> None:
    async with api() as served:
        await served.post("/v1/chat/completions", chat())
        traces = served.services.traces.latest("local", lambda _: True, 1)
    (there,) = pickle.loads(pickle_traces(traces))
    assert there.as_json() == traces[0].as_json()
    assert len(pickle_traces(traces)) < 0.8 * len(pickle.dumps(traces)), (
        "fields go by position, not by name"
    )


async def test_engines_get_the_span_in_their_requests_heads() -> None:
    heads: list[tuple[str | None, str | None]] = []

    async def refuse(request: web.Request) -> web.Response:
        heads.append((request.headers.get("traceparent"), request.headers.get("tracestate")))
        return web.Response(status=400, text="no")

    app = web.Application()
    app.router.add_post("/generate", refuse)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        pair = SglangPair(
            PairAddress(url, url, "127.0.0.1", 1), limits=LIMITS, retries=ONCE, breaker=NEVER_OPEN
        )
        for span in (SpanContext("ab" * 16, "cd" * 8, 1, "vendor=1"), None):
            CURRENT.set(span)
            with suppress(EngineError):
                await collect(pair, generation())
        await pair.aclose()
    assert set(heads) == {(CLIENT["traceparent"], "vendor=1"), (None, None)}
