"""What a hostile tenant sends: it gets an error of its own, no other tenant notices, and nothing is
left running.
"""

import asyncio
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.scripted.server import Fault
from benchmarks.stalls import large_bodies
from shell_router.api import ApiSettings
from shell_router.api.bodies import LONG_BODY_BYTES, MAX_BODY_NUMBERS, MAX_BODY_VALUES
from shell_router.batch.api.routes import add_batches
from shell_router.batch.api.storage import open_folder
from shell_router.config import BatchesSettings
from shell_router.engines.native_body import NativeRules
from shell_router.engines.sglang import SglangPair
from shell_router.routing.failures import BreakerSettings
from tests.fakes.api_server import Api, api, chat, jsonl, line
from tests.fakes.hostile_inputs import (
    BASES,
    COMPLETIONS,
    FAMILIES,
    HEADS,
    MALFORMED,
    MESSAGES,
    inline_topology,
)
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_pair import LIMITS, SOON, Served, served
from tests.fakes.turns import Turns, counted

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCABULARY, CONTEXT = 1000, 4096
ALICE, BOB = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}
SETTINGS = ApiSettings(
    keys={"alice": "sk-a", "bob": "sk-b"},
    max_body_bytes=2**23,
    max_agents_per_tenant=8,
    max_connections=40,
    retry_after_s=3,
)
MARKS = "".join(f"\ue000{number}\ue001" for number in range(50_000))
FAR = 2**31 - 1


def nested(levels: int) -> object:
    found: object = "x"
    for _ in range(levels):
        found = [found]
    return found


def agent(sampling: object = None, **fields: object) -> dict[str, object]:
    given = {} if sampling is None else {"sampling_params": sampling}
    return {"program": "p", "agent": "a", "model": "small", "prompt": "Hi", **given, **fields}


def form(*parts: bytes) -> tuple[bytes, dict[str, str]]:
    body = b"".join(b"--B\r\n%s\r\n" % part for part in parts) + b"--B--\r\n"
    return body, {"Content-Type": "multipart/form-data; boundary=B"}


def part(name: bytes, content: bytes, headers: bytes = b"", more: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="%s"%s\r\n%s\r\n%s' % (
        name,
        more,
        headers,
        content,
    )


PURPOSE, FILE = part(b"purpose", b"batch"), part(b"file", b"{}", more=b'; filename="x"')
CHAT, AGENT, GENERATE, FILES = (
    "/v1/chat/completions",
    "/v1/agent/requests",
    "/generate",
    "/v1/files",
)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": nested(200)}}}

BODIES: dict[str, tuple[str, object]] = {
    "stop ids beyond the vocabulary": (CHAT, chat(stop_token_ids=[FAR], min_tokens=2)),
    "stop ids of a model": (CHAT, chat(model="small", stop_token_ids=[VOCABULARY])),
    "endless stops": (CHAT, chat(stop=[f"stop {number}" for number in range(100_000)])),
    "a long stop": (CHAT, chat(stop="x" * 10_000)),
    "a deep schema": (CHAT, chat(json_schema=nested(200), response_format=None)),
    "a deep response format": (CHAT, chat(response_format=SCHEMA)),
    "a long text": (CHAT, chat("word " * 200_000)),
    "a long text to choose a model for": (CHAT, chat("word " * 200_000, model="auto")),
    "a megabyte for a role": (
        CHAT,
        {"model": "small", "messages": [{"role": "x" * 10**6, "content": "Hi"}]},
    ),
    "a megabyte for a model": (CHAT, chat(model="x" * 10**6)),
    "a megabyte for a label": (CHAT, chat(metadata={"x" * 10**6: 1})),
    "a body over the limit": (CHAT, chat("x" * 2**23)),
    "several samples": (AGENT, agent({"n": 2})),
    "deep parameters": (AGENT, agent({"custom": nested(300)})),
    "stop ids of an agent": (AGENT, agent({"stop_token_ids": [FAR], "min_new_tokens": 2})),
    "biases beyond the vocabulary": (AGENT, agent({"logit_bias": {str(VOCABULARY): 1}})),
    "biases beyond a float": (AGENT, agent({"logit_bias": {"1": 1e300}})),
    "a text for a number": (AGENT, agent({"stream_interval": "x"})),
    "SGLang's own parameters": (
        AGENT,
        agent({"custom_params": {"__sglang_reasoning_in_grammar": True}}),
    ),
    "a text of marks": (AGENT, agent(prompt=None, messages=[{"role": "user", "content": MARKS}])),
    "a text of an agent": (AGENT, agent(prompt="word " * 200_000)),
    **{
        f"{field} on {route}": (route, {"text": "x", field: "http://10.0.0.1"})
        for field in (
            "image_data",
            "custom_logit_processor",
            "session_params",
            "lora_path",
            "priority",
            "rid",
        )
        for route in (GENERATE, "/prefill_only")
    },
    "a data-parallel rank": (GENERATE, {"text": "x", "data_parallel_rank": 7}),
    "another's cache": (GENERATE, {"text": "x", "extra_key": "bob"}),
    "ids beyond the vocabulary": (GENERATE, {"input_ids": [VOCABULARY]}),
    "log probabilities beyond it": (GENERATE, {"input_ids": [1], "token_ids_logprob": [-1]}),
    "native samples": (GENERATE, {"input_ids": [1], "sampling_params": {"n": 2}}),
    "a native text": (GENERATE, {"text": "word " * 200_000}),
    "a native batch": (GENERATE, {"input_ids": [[1]] * 2000}),
    "a native batch over the tenant's limit": (GENERATE, {"input_ids": [[1]] * 9}),
    "a batch of no file": (
        "/v1/batches",
        {"input_file_id": "x" * 10**6, "endpoint": CHAT, "completion_window": "24h"},
    ),
}
RAW: dict[str, tuple[str, str, Any, dict[str, str]]] = {
    "deep JSON": ("POST", CHAT, b'{"a":' * 5000 + b"1" + b"}" * 5000, {}),
    "deep JSON of the native route": (
        "POST",
        GENERATE,
        b'{"text":"x","text":' + b"[" * 900 + b"]" * 900 + b"}",
        {},
    ),
    "no JSON": ("POST", CHAT, b"\xff\xfe{", {}),
    "a chat that is a number": ("POST", CHAT, b"1e999", {}),
    "many fields": ("POST", FILES, *form(*(part(b"f%d" % number, b"x") for number in range(2000)))),
    "a field without an end": ("POST", FILES, *form(part(b"purpose", b"x" * 10**6))),
    "a field's endless name": ("POST", FILES, *form(part(b"x" * 5000, b"x"), PURPOSE, FILE)),
    "a part of an unknown coding": (
        "POST",
        FILES,
        *form(part(b"file", b"x", b"Content-Encoding: odd\r\n")),
    ),
    "a part of an unknown transfer": (
        "POST",
        FILES,
        *form(part(b"file", b"x", b"Content-Transfer-Encoding: odd\r\n", b'; filename="x"')),
    ),
    "a part that is no base64": (
        "POST",
        FILES,
        *form(part(b"file", b"\xff=", b"Content-Transfer-Encoding: base64\r\n", b'; filename="x"')),
    ),
    "a part that is no gzip": (
        "POST",
        FILES,
        *form(part(b"file", b"nonsense", b"Content-Encoding: gzip\r\n", b'; filename="x"')),
    ),
    "a part without headers": ("POST", FILES, *form(b"\r\nx")),
    "parts in parts": (
        "POST",
        FILES,
        *form(b"Content-Type: multipart/mixed; boundary=C\r\n\r\n--C\r\n\r\nx\r\n--C--"),
    ),
    "a length that is none": ("POST", FILES, *form(part(b"file", b"x", b"Content-Length: -5\r\n"))),
    "a form without an end": ("POST", FILES, form(PURPOSE, FILE)[0][:-10], form()[1]),
    "a form without a boundary": ("POST", FILES, b"x", {"Content-Type": "multipart/form-data"}),
    "odd bytes in a path": ("GET", "/v1/files/%ff%fe", None, {}),
    "an end of text in a path": ("GET", "/v1/agent/requests/%00", None, {}),
    "odd bytes in a query": ("GET", "/v1/files?limit=%ff&after=%ff", None, {}),
    "a path out of the folder": ("GET", "/v1/files/..%2f..%2fetc%2fpasswd/content", None, {}),
    "no batch to cancel": ("POST", "/v1/batches/%ff/cancel", b"", {}),
}
HEADERS = {
    "a key of odd bytes": (b"Authorization: Bearer \xff\xfe", 401),
    "a name of odd bytes": (b"Authorization: Bearer sk-a\r\nx-model: \xff", 404),
    "an id of odd bytes": (
        b"Authorization: Bearer sk-a\r\nx-request-id: \xff\r\nx-routing-key: \xff",
        400,
    ),
}


@dataclass(frozen=True)
class Attacked:
    """A router with two tenants, before scripted models and a scripted pair."""

    api: Api
    pair: Served

    async def send(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | None = None,
        *,
        chunked: bool = False,
    ) -> tuple[int, dict[str, str], Any]:
        url, sent = self.api.url + path, None if body is None else io.BytesIO(body)
        fields = {"data": sent, "headers": {**ALICE, **headers}, "chunked": chunked or None}
        async with self.api.client.request(method, url, **fields) as answer:
            raw = await answer.read()
            assert answer.status < 500, raw
            assert len(raw) < 20_000, "an error repeats what was sent"
            return answer.status, dict(answer.headers), json.loads(raw) if raw else None

    async def still_serves(self) -> None:
        """Bob is answered at once, by models and engines, and nothing of Alice's is left
        running."""
        assert (await self.api.post(CHAT, chat(), **BOB))[0] == 200
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
        assert (await self.api.post(GENERATE, body, **BOB))[0] == 200
        assert (await self.api.get("/ready"))[0] == 200
        assert (await self.api.get(FILES, **BOB))[0] == 200
        await self.pair.idle()
        assert not any(engine.running for engine in self.api.moa.engines.values())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Attacked]:
    moa = ScriptedMoa(context_length=CONTEXT)
    for name, model in moa.models.items():
        moa.models[name] = replace(model, vocabulary=VOCABULARY)
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(served())
        rules = NativeRules(VOCABULARY, CONTEXT)
        breaker = BreakerSettings(failures=3)
        relay = SglangPair(
            *pair.pair.fleet.addresses, limits=LIMITS, retries=SOON, rules=rules, breaker=breaker
        )
        stack.push_async_callback(relay.aclose)
        folder = stack.enter_context(open_folder(tmp_path_factory.mktemp("batches")))
        kept = BatchesSettings(max_tenant_files=6)
        running = api(
            moa,
            SETTINGS,
            relays={"small": relay},  # type: ignore[dict-item]
            extend=lambda app: add_batches(app, folder, kept, {}),
        )
        yield Attacked(await stack.enter_async_context(running), pair)


@pytest.mark.parametrize("what", BODIES)
async def test_a_hostile_body_is_refused_and_no_other_tenant_notices(
    attacked: Attacked, what: str
) -> None:
    path, body = BODIES[what]
    for _ in range(4):  # as often as would open a circuit breaker
        status, _, answer = await attacked.send("POST", path, {}, json.dumps(body).encode())
        assert 400 <= status < 500 and answer["error"]["message"]
    await attacked.still_serves()


@pytest.mark.parametrize("what", RAW)
async def test_hostile_bytes_are_refused_and_no_other_tenant_notices(
    attacked: Attacked, what: str
) -> None:
    method, path, body, headers = RAW[what]
    for chunked in (False, True) if body else (False,):
        status, _, _ = await attacked.send(method, path, headers, body, chunked=chunked)
        assert 400 <= status < 500
        await attacked.still_serves()


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_input_of_a_family_is_refused_and_nothing_is_left_running(
    attacked: Attacked, family: str
) -> None:
    wrong = []
    for one in FAMILIES[family]:
        status, _, answer = await attacked.send(one.method, one.path, one.headers, one.body)
        if not (400 <= status < 500 and answer["error"]["message"]):
            wrong.append((status, one.method, one.path, (one.body or b"")[:300]))
    assert wrong == [], wrong
    await attacked.still_serves()


@pytest.mark.parametrize("family", MALFORMED)
async def test_malformed_markers_schemas_tool_messages_and_parameters_are_bad_requests_that_name_their_field(
    attacked: Attacked, family: str
) -> None:
    engines = attacked.api.moa.engines.values()
    asked = [len(engine.generated) for engine in engines]
    assert len(MALFORMED[family]) > 20
    for one in MALFORMED[family]:
        status, _, answer = await attacked.send(one.method, one.path, one.headers, one.body)
        field = (
            answer["error"].get("param") or one.path == MESSAGES
        )  # Anthropic's errors have no place for it
        assert (status, bool(field)) == (400, True), (one.body, answer)
    assert [len(engine.generated) for engine in engines] == asked and not attacked.api.moa.running


@pytest.mark.parametrize("path", [*BASES, COMPLETIONS])
@pytest.mark.parametrize(
    "crowd", [b"[]," * MAX_BODY_VALUES, b"1," * (MAX_BODY_NUMBERS + 1)], ids=["values", "numbers"]
)
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    attacked: Attacked, path: str, crowd: bytes
) -> None:
    body = b'{"no": "JSON", "as it ends early": [%s' % crowd.ljust(LONG_BODY_BYTES)
    status, _, answer = await attacked.send("POST", path, {}, body)
    assert status == 400 and "The body holds more than" in answer["error"]["message"]


LARGE = {**large_bodies(), "crowds of values": FAMILIES["crowds of values"][::3]}


@pytest.mark.parametrize("what", LARGE)
async def test_no_turn_of_the_event_loop_does_much_for_a_large_body(
    attacked: Attacked, what: str
) -> None:
    """That many lines take a few milliseconds. A stopwatch would measure what else the machine
    does.
    """
    turns = Turns()
    for one in LARGE[what]:
        with counted(turns):
            status, _, _ = await attacked.send(one.method, one.path, one.headers, one.body)
        assert 400 <= status < 500
    assert 100 < turns.most < 80_000, turns.most


@pytest.mark.parametrize("where", ["first", "last", "all", "step"])
async def test_topologies_like_the_hostile_ones_are_served_with_right_parameters(
    attacked: Attacked, where: str
) -> None:
    one = inline_topology(where, {"stop_token_ids": [VOCABULARY - 1], "temperature": 0.5})
    status, _, answer = await attacked.send(one.method, one.path, one.headers, one.body)
    assert status == 200, answer


async def test_there_are_as_many_hostile_inputs_as_the_docs_say() -> None:
    raw = sum(2 if body else 1 for _, _, body, _ in RAW.values())  # in chunks, too
    number = (
        len(BODIES)
        + raw
        + 2 * len(HEADERS)
        + len(HEADS)
        + sum(map(len, (FAMILIES | MALFORMED).values()))
    )
    page = Path(__file__).parents[2] / "docs/how-to/serve-several-tenants.md"
    assert f"sends {number:,} hostile requests" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("head", HEADS)
async def test_what_no_client_sends_is_refused_or_ends_the_connection(
    attacked: Attacked, head: bytes
) -> None:
    at = urlsplit(attacked.api.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(head)
    writer.write_eof()
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionResetError):
            line = await reader.readline()
            assert not line or line.split()[1].startswith(b"4"), line
    writer.close()
    await attacked.still_serves()


@pytest.mark.parametrize("what", HEADERS)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "aiohttp"])
async def test_odd_bytes_in_headers_are_the_clients_fault(
    attacked: Attacked, what: str, plain: bool
) -> None:
    headers, expected = HEADERS[what]
    at = urlsplit(attacked.api.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    framing = (
        b"Content-Length: 2\r\n\r\n{}"
        if plain
        else b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\n%s\r\n%s" % (headers, framing))
    async with asyncio.timeout(30):
        assert (await reader.readline()).split()[1] == str(expected).encode()
    writer.close()
    await attacked.still_serves()


@pytest.mark.parametrize("what", ["fields", "a field"])
async def test_a_form_in_chunks_without_an_end_is_refused_by_its_first_bytes(
    attacked: Attacked, what: str
) -> None:
    """Without a Content-Length, no limit of a body sees how much is on its way."""
    at = urlsplit(attacked.api.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-a\r\nContent-Type: %s\r\n"
    writer.write(
        head % (FILES.encode(), form()[1]["Content-Type"].encode())
        + b"Transfer-Encoding: chunked\r\n\r\n"
    )
    many = (b"--B\r\n%s\r\n" % part(b"f%d" % number, b"x" * 1000) for number in range(60_000))
    one = chain((b"--B\r\n%s" % part(b"f", b"x"),), repeat(b"x" * 2**16, 1000))
    answered, sent = asyncio.create_task(reader.readline()), 0
    for piece in many if what == "fields" else one:
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(0)
        sent += len(piece)
        if answered.done():
            break
    assert (await answered).split()[1] == b"400" and sent < 2**24, sent
    writer.close()
    await attacked.still_serves()


async def test_a_name_of_odd_bytes_breaks_no_list(attacked: Attacked) -> None:
    odd = part(b"file", b"{}", more=b'; filename="\xff\xfe.jsonl"')
    status, _, file = await attacked.send("POST", FILES, form()[1], form(PURPOSE, odd)[0])
    assert status == 200 and file["filename"].endswith(".jsonl")
    assert (await attacked.send("GET", FILES, {}))[2]["data"][0]["id"] == file["id"]
    await attacked.send("DELETE", f"{FILES}/{file['id']}", {})


async def test_a_tenants_waiting_agents_take_only_its_own_places(attacked: Attacked) -> None:
    waiting = [
        asyncio.create_task(
            attacked.api.post(
                AGENT,
                agent(program=f"p{number}", prompt=[{"output_of": "never"}], wait_s=600),
                **ALICE,
            )
        )
        for number in range(SETTINGS.max_agents_per_tenant)
    ]
    for number in range(len(waiting)):
        while (await attacked.api.get(f"{AGENT}/p{number}", **ALICE))[0] != 200:
            pass
    for body in (agent(program="more"), chat()):
        path = AGENT if "program" in body else CHAT
        status, headers, _ = await attacked.send("POST", path, {}, json.dumps(body).encode())
        assert (status, headers["Retry-After"]) == (429, "3")
    assert (await attacked.send("POST", "/v1/batches/mine/cancel", {}, b""))[0] == 404, (
        "what cancels is not refused"
    )
    await attacked.still_serves()
    for number in range(len(waiting)):
        assert (await attacked.send("DELETE", f"{AGENT}/p{number}", {}))[0] == 200
    assert {status for status, _ in await asyncio.gather(*waiting)} == {502}
    await attacked.still_serves()
    assert (await attacked.send("POST", CHAT, {}, json.dumps(chat()).encode()))[0] == 200


async def test_a_tree_counts_its_agents(attacked: Attacked) -> None:
    tree = {"model": "duo", "messages": [{"role": "user", "content": "Hi"}]}
    answers = await asyncio.gather(*(attacked.api.post(CHAT, tree, **ALICE) for _ in range(8)))
    assert {status for status, _ in answers} == {200, 429}


async def test_a_tenants_files_take_only_its_own_share(attacked: Attacked) -> None:
    body, headers = form(PURPOSE, FILE)
    kept = []
    while (found := await attacked.send("POST", FILES, headers, body))[0] == 200:
        kept.append(found[2]["id"])
    assert found[0] == 403 and found[2]["error"]["code"] == "quota_exceeded" and len(kept) == 6
    async with attacked.api.client.post(
        attacked.api.url + FILES, data=body, headers={**BOB, **headers}
    ) as answer:
        assert answer.status == 200
    for id in kept:
        await attacked.send("DELETE", f"{FILES}/{id}", {})
    assert (await attacked.send("POST", FILES, headers, body))[0] == 200


async def test_the_lines_of_a_batch_are_checked_as_requests_are(attacked: Attacked) -> None:
    lines = jsonl(
        line("far", stop_token_ids=[FAR]),
        line("deep", json_schema=nested(200)),
        line("long", "x" * 10**6),
    )
    _, _, file = await attacked.send(
        "POST", FILES, form()[1], form(PURPOSE, part(b"file", lines))[0]
    )
    wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "1h"}
    _, _, batch = await attacked.send("POST", "/v1/batches", {}, json.dumps(wanted).encode())
    async with asyncio.timeout(30):
        while batch["status"] not in ("completed", "failed"):
            _, _, batch = await attacked.send("GET", f"/v1/batches/{batch['id']}", {})
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
    async with attacked.api.client.get(
        f"{attacked.api.url}{FILES}/{batch['error_file_id']}/content", headers=ALICE
    ) as answer:
        statuses = [
            json.loads(one)["response"]["status_code"] for one in (await answer.text()).splitlines()
        ]
    assert statuses == [400, 400, 400]
    await attacked.still_serves()


SECRETS = {
    "a control character in a key": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: SECRET\x01\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization SECRET\r\n\r\n",
    "a long key": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: %s\r\n\r\n" % (b"SECRET" * 3000),
    "a request line of more parts": b"GET / HTTP/1.1 SECRET\r\nHost: x\r\n\r\n",
    "no URL": b"GET http://[SECRET/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "no chunk": b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nSECRET\r\n",
    "an odd Expect of an unknown path": b"GET /x HTTP/1.1\r\nHost: x\r\nExpect: SECRET\xa0\r\n\r\n",
    "an odd Expect": b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: SECRET\xa0\r\n\r\n",
}


@pytest.mark.parametrize("what", SECRETS)
async def test_a_request_that_cannot_be_read_is_the_clients_fault_and_the_log_quotes_none_of_it(
    attacked: Attacked, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    at = urlsplit(attacked.api.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(SECRETS[what])
    async with asyncio.timeout(30):
        assert (await reader.readline()).split()[1] in (b"400", b"417")
    writer.close()
    assert "SECRET" not in caplog.text and "Traceback" not in caplog.text
    assert len(caplog.text) < 1000
    await attacked.still_serves()


async def test_idle_connections_keep_nobody_out(attacked: Attacked) -> None:
    at = urlsplit(attacked.api.url)
    idle = [
        await asyncio.open_connection(at.hostname, at.port)
        for _ in range(2 * SETTINGS.max_connections)
    ]
    for _, writer in idle[1::2]:
        writer.write(b"POST /generate HTTP/1.1\r\nHo")
    async with aiohttp.ClientSession() as fresh:
        async with fresh.post(attacked.api.url + CHAT, json=chat(), headers=BOB) as answer:
            assert answer.status == 200
        async with asyncio.timeout(30):
            ended = [await reader.read() for reader, _ in idle[: SETTINGS.max_connections]]
    assert set(ended) == {b""}, "the longest idle ones are closed"
    for _, writer in idle:
        writer.close()
    await attacked.still_serves()


async def test_a_head_that_drips_is_given_up() -> None:
    async with api(settings=ApiSettings(body_timeout_s=0.2)) as quick:
        at = urlsplit(quick.url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: ")
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_errors_name_no_engines_address(attacked: Attacked) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    ports = {
        urlsplit(server.url).port
        for server in (attacked.pair.servers.prefill, attacked.pair.servers.decode)
    }
    for kind in ("refuse", "close", "error_event"):
        attacked.pair.break_leg("decode", Fault(kind, times=6))  # type: ignore[arg-type]
        for _ in range(2):  # at last the breaker is open
            status, answer = await attacked.api.post(GENERATE, body, **ALICE)
            assert status >= 500
            assert not re.search("|".join(map(str, ports)), answer["error"]["message"]), answer
    attacked.pair.break_leg("decode", None)


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "[1:2:3]"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://[1:2:3]"},
        {"Origin": "null"},
    ],
)
async def test_without_keys_no_page_of_another_site_is_served(headers: dict[str, str]) -> None:
    async with api() as local:
        body = json.dumps(chat()).encode()
        async with local.client.post(
            local.url + CHAT, data=body, headers={**JSON, **headers}
        ) as answer:
            assert answer.status == 403
        for host in ("LocalHost", "127.0.0.1:8000", "[::1]:8000"):
            own = {"Host": host, "Origin": f"http://{host}", **JSON}
            async with local.client.post(local.url + CHAT, data=body, headers=own) as answer:
                assert answer.status == 200


@pytest.mark.parametrize(
    "kind", ["text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "Multipart/Form-Data"]
)
async def test_without_keys_no_body_is_read_that_a_page_may_post_anywhere(
    attacked: Attacked, kind: str
) -> None:
    body, posted = json.dumps(chat()).encode(), {"Content-Type": kind}
    async with api() as local:
        for sent in (body, io.BytesIO(body)):
            async with local.client.post(local.url + CHAT, data=sent, headers=posted) as answer:
                problem = (await answer.json())["error"]
                assert (answer.status, problem["code"]) == (415, "unsupported_media_type")
                assert "-H 'Content-Type: application/json'" in problem["message"]
        async with local.client.post(
            local.url + FILES, data=form(PURPOSE)[0], headers=form()[1]
        ) as answer:
            assert (await answer.json())["error"]["code"] == "unknown_route", "files come as forms"
    assert (await attacked.send("POST", CHAT, posted, body))[0] == 200, (
        "no page of another site knows the key"
    )
