"""Keys over HTTP: what each may ask, how much, and how files of keys and certificates change while
the router runs.
"""

import asyncio
import json
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shell_router.api import ApiSettings, create_app, serve_app
from shell_router.api.keys import Keys
from shell_router.app.rereads import Reread
from shell_router.app.serving import load_tls, renew_certificate
from shell_router.batch.api.routes import add_batches
from shell_router.batch.api.storage import open_folder
from shell_router.config import ApiKey, BatchesSettings, ListenTls
from shell_router.config.models import TlsClient
from shell_router.core.engine import ChatServing, Relay
from shell_router.errors import ConfigError, Unauthorized
from shell_router.http.server import bind_sockets
from tests.fakes.api_server import Api, ScriptedRelay, api, chat, until
from tests.fakes.certificates import authority

UNKNOWING = ssl.create_default_context()
pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, AGENT = "/v1/chat/completions", "/v1/agent/requests"
SETTINGS = ApiSettings(
    keys={
        "alice": ApiKey(key="sk-a", models=("small", "duo")),
        "bob": "sk-b",
        "carol": ApiKey(key="sk-c", tokens_per_minute=10),
        "dora": ApiKey(key="sk-d", routes=("/v1/models",)),
        "edna": ApiKey(key="sk-e", native_fields=("return_hidden_states", "image_url")),
        "fred": ApiKey(key="sk-f", service_tier="flex"),
        "gwen": ApiKey(key="sk-g", service_tier="priority"),
        "ops": ApiKey(key="sk-o", operator=True),
    },
    max_agents_per_tenant=4,
)
NATIVE = b'{"text":"ok","meta_info":{"prompt_tokens":30,"completion_tokens": 12}}'


def now() -> float:
    return 0.0


def bearing(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name[0]}"}


ALICE, BOB, CAROL, DORA, EDNA, FRED, GWEN, OPS = map(
    bearing, ("alice", "bob", "carol", "dora", "edna", "fred", "gwen", "ops")
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    relays: dict[str, Relay] = {
        "small": ScriptedRelay((NATIVE,)),
        "medium": ScriptedRelay((NATIVE,)),
    }
    with open_folder(tmp_path_factory.mktemp("batches")) as folder:
        batches = BatchesSettings()
        async with api(
            settings=SETTINGS,
            relays=relays,
            extend=lambda app: add_batches(app, folder, batches, {}),
        ) as running:
            yield running


MINE = {"agents": {"root": {"model": "small"}}}
INLINE = {"name": "x", "agents": {"root": {"model": "small", "fallbacks": ["medium"]}}}
ALLOWED = [
    (CHAT, chat(model="small")),
    (CHAT, chat(model="duo")),
    (CHAT, chat(topology={"name": "x", "agents": {"root": {"model": "small"}}}, model="x")),
    (AGENT, {"program": "p", "agent": "a", "model": "small", "prompt": "Hi"}),
    ("/v1/responses", {"model": "small", "input": "Hi"}),
    ("/generate", {"model": "small", "text": "x"}),
]
REFUSED = [
    (CHAT, chat(model="medium")),
    (CHAT, chat(model="auto")),
    (CHAT, chat(model=["small", "medium"])),
    (CHAT, chat(topology=INLINE, model="duo")),
    (CHAT, chat(judge="small", models=["small", "medium"], model="duo")),
    (CHAT, chat(model="medium", program="p", lazy=True)),
    (AGENT, {"program": "p", "agent": "b", "model": "medium", "prompt": "Hi"}),
    (AGENT, {"program": "p", "agent": "b", "model": ["small", "medium"], "prompt": "Hi"}),
    ("/v1/responses", {"model": "medium", "input": "Hi"}),
    ("/v1/completions", {"model": "medium", "prompt": "Hi"}),
    (
        "/v1/messages",
        {"model": "medium", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
    ),
    ("/v1/embeddings", {"model": "medium", "input": "Hi"}),
    ("/generate", {"model": "medium", "text": "x"}),
    ("/prefill_only", {"model": "medium", "text": "x"}),
    ("/v1/batches", {"input_file_id": "x", "endpoint": CHAT, "completion_window": "1h"}),
]


@pytest.mark.parametrize(("path", "body"), ALLOWED)
async def test_a_key_for_some_models_may_use_them(served: Api, path: str, body: object) -> None:
    assert (await served.post(path, body, **ALICE))[0] == 200


@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_a_key_for_some_models_may_use_no_others(
    served: Api, path: str, body: object
) -> None:
    status, answer = await served.post(path, body, **ALICE)
    assert (status, answer["error"]["type"]) == (403, "permission_error"), answer
    assert (await served.post(path, body, **BOB))[0] in (200, 400, 404, 409), "another key may"


async def test_lists_name_what_the_key_may_use(served: Api) -> None:
    _, models = await served.get("/v1/models", **ALICE)
    assert {one["id"] for one in models["data"]} == {"small", "duo"}
    assert (await served.get("/v1/models/medium", **ALICE))[0] == 403
    assert len((await served.get("/v1/models", **BOB))[1]["data"]) > 2
    assert (await served.get("/v1/topologies", **ALICE))[1]["data"][0]["name"] == "duo"


async def test_figures_of_all_tenants_and_administration_are_the_operators(served: Api) -> None:
    assert (await served.get("/metrics", **BOB))[0] == 403
    async with served.client.get(f"{served.url}/metrics", headers=OPS) as answer:
        assert answer.status == 200
    for headers, status in ((BOB, 403), (OPS, 201)):
        async with served.client.put(
            f"{served.url}/v1/topologies/mine", json=MINE, headers=headers
        ) as answer:
            assert answer.status == status
    for headers, status in ((BOB, 403), (OPS, 200)):
        async with served.client.delete(
            f"{served.url}/v1/topologies/mine", headers=headers
        ) as answer:
            assert answer.status == status


async def test_a_key_for_some_routes_may_ask_no_others(served: Api) -> None:
    assert (await served.get("/v1/models/small", **DORA))[0] == 200
    assert (await served.post(CHAT, chat(), **DORA))[0] == 403
    assert (await served.get("/health"))[0] == 200, "probes need no key"


async def test_a_put_whose_path_ends_in_cancel_is_admitted_as_any_other(served: Api) -> None:
    """It once took no place, and so no limit counted it."""
    body = {
        "program": "p",
        "agent": "waits",
        "model": "small",
        "prompt": [{"output_of": "never"}],
        "wait_s": 60,
    }
    running = [
        asyncio.create_task(served.post(AGENT, {**body, "agent": f"a{n}"}, **BOB)) for n in range(4)
    ]
    while len((await served.get(f"{AGENT}/p", **BOB))[1].get("agents", ())) < 4:
        pass
    async with served.client.put(
        f"{served.url}/v1/agent/outputs/p/cancel", data=b"x", headers=BOB
    ) as answer:
        assert answer.status == 429
    assert (await served.post("/v1/batches/none/cancel", {}, **BOB))[0] == 404, (
        "what makes space is not refused"
    )
    async with served.client.delete(f"{served.url}{AGENT}/p", headers=BOB) as answer:
        assert answer.status == 200
    await asyncio.gather(*running)


async def test_a_request_that_alone_needs_too_many_agents_is_wrong_and_not_early(
    served: Api,
) -> None:
    agents = {f"a{n}": {"model": "small"} for n in range(4)}
    tree = {"name": "x", "agents": {**agents, "root": {"model": "small", "precursors": [*agents]}}}
    status, answer = await served.post(CHAT, chat(topology=tree), **BOB)
    assert status == 400 and "max_agents_per_tenant" in answer["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_over_its_tokens_a_minute_a_tenant_may_still_read(path: str) -> None:
    relays: dict[str, Relay] = {"small": ScriptedRelay((NATIVE,))}
    body = chat("word " * 20) if path == CHAT else {"text": "x"}
    async with api(settings=SETTINGS, relays=relays) as fresh:
        assert (await fresh.post(path, body, **CAROL))[0] == 200
        async with fresh.client.post(fresh.url + path, json=body, headers=CAROL) as answer:
            assert answer.status == 429 and 1 <= int(answer.headers["Retry-After"]) <= 120
            assert "10 tokens" in (await answer.json())["error"]["message"]
        assert (await fresh.get("/v1/models", **CAROL))[0] == 200
        async with fresh.client.delete(f"{fresh.url}{AGENT}/none", headers=CAROL) as answer:
            assert answer.status == 404
        assert (await fresh.post(path, body, **BOB))[0] == 200


@pytest.mark.parametrize("path", ["/generate", "/prefill_only", CHAT, "/v1/completions"])
async def test_engines_take_the_further_fields_that_a_request_s_key_names(path: str) -> None:
    relay = ScriptedRelay((NATIVE,), chat=ChatServing())
    body = {
        CHAT: chat(model="small", logprobs=True),
        "/v1/completions": {"model": "small", "prompt": "x"},
    }
    async with api(settings=SETTINGS, relays={"small": relay}) as fresh:
        for headers in (EDNA, BOB):
            assert (await fresh.post(path, body.get(path, {"text": "x"}), **headers))[0] == 200
    assert relay.fields == [("return_hidden_states", "image_url"), ()]


async def test_tokens_of_native_streams_count(served: Api) -> None:
    counts = [{"prompt_tokens": 10, "completion_tokens": n} for n in range(8, 12)]
    events = [json.dumps({"meta_info": one, "index": at}) for one in counts for at in range(2)]
    stream = "".join(f"data: {event}\n\n" for event in events).encode()
    cut = (stream[at : at + 7] for at in range(0, len(stream), 7))
    relay = ScriptedRelay((*cut, b"data: [DONE]\n\n"), content_type="text/event-stream")
    async with api(settings=SETTINGS, relays={"small": relay}) as fresh:
        async with fresh.client.post(
            f"{fresh.url}/generate", json={"text": "x"}, headers=CAROL
        ) as answer:
            await answer.read()
        now_s = fresh.services.clock()
        assert fresh.services.rates.wait_s("carol", 42, now_s) > 0
        assert fresh.services.rates.wait_s("carol", 43, now_s) == 0


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/generate", {"text": "x" * 35, "sampling_params": {"max_new_tokens": 50}}, 72),
        ("/generate", {"text": "x" * 35}, 139),
        ("/prefill_only", {"text": "x" * 35}, 11),
        (CHAT, chat(model="small", logprobs=True, max_tokens=50), None),
    ],
)
async def test_a_client_that_leaves_before_its_answer_is_charged_what_it_could_have_cost(
    path: str, body: dict[str, object], tokens: int | None
) -> None:
    relay = ScriptedRelay((b"{", b"}"), gate=asyncio.Event(), chat=ChatServing())
    async with api(settings=SETTINGS, relays={"small": relay}) as fresh:
        asked = asyncio.create_task(fresh.post(path, body, **CAROL))
        await until(lambda: bool(relay.forwarded))
        asked.cancel()
        await until(lambda: relay.left_early == 1)
        rates = fresh.services.rates
        await until(lambda: rates.wait_s("carol", 10, fresh.services.clock()) > 0)
        (_, sent) = relay.forwarded[0]
        expected = tokens or len(sent) // 4 + 50
        now_s = fresh.services.clock()
        assert rates.wait_s("carol", expected, now_s) > 0
        assert rates.wait_s("carol", expected + 1, now_s) == 0
        assert (await fresh.post(path, body, **CAROL))[0] == 429


async def test_a_file_that_changes_counts_and_a_wrong_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, keys = tmp_path / "keys", Keys({"alice": "old"})
    file.write_text("new")

    async def take() -> None:
        text = file.read_text()
        if text == "spoilt":
            raise ValueError("of a reader")
        keys.take({"alice": text})

    reread = Reread("keys", lambda: (file,), take)
    await reread.look()
    assert keys.find("Bearer old", now).tenant == "alice", "nothing has changed since it was added"
    file.write_text("newer")
    await reread.look()
    assert keys.find("Bearer newer", now).tenant == "alice"
    with pytest.raises(Unauthorized):
        keys.find("Bearer old", now)
    for spoil in (lambda: file.write_text(""), lambda: file.write_text("spoilt"), file.unlink):
        spoil()
        await reread.look()
        assert keys.find("Bearer newer", now).tenant == "alice"
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3 and "what was before stays" in errors[0].message


async def test_an_encrypted_key_is_refused_and_the_terminal_asked_for_nothing(
    tmp_path: Path,
) -> None:
    own = authority(tmp_path).signed("router")
    locked = tmp_path / "locked.key"
    encrypt = [
        "openssl",
        "pkey",
        "-in",
        own.key,
        "-aes256",
        "-passout",
        "pass:secret",
        "-out",
        locked,
    ]
    subprocess.run(encrypt, check=True, capture_output=True)  # noqa: ASYNC221
    with pytest.raises(ConfigError, match=r"listen\.tls: .*locked\.key is encrypted.*openssl pkey"):
        load_tls(ListenTls(own.certificate, locked))
    with pytest.raises(ConfigError, match=r"engine_tls: .*locked\.key is encrypted"):
        TlsClient(None, own.certificate, locked).context("engine_tls")


async def test_a_client_that_begins_no_tls_is_given_up(tmp_path: Path, served: Api) -> None:
    own = authority(tmp_path).signed("router")
    context = load_tls(ListenTls(own.certificate, own.key))
    with bind_sockets() as sockets:
        app = create_app(served.services, ApiSettings(body_timeout_s=0.05))
        async with serve_app(app, sockets, tls=context) as url:
            reader, writer = await asyncio.open_connection(*url.removeprefix("https://").split(":"))
            async with asyncio.timeout(30):
                assert await reader.read() == b""
            writer.close()


async def test_https_is_served_and_a_renewed_certificate_counts_without_a_restart(
    tmp_path: Path, served: Api
) -> None:
    signing = authority(tmp_path)
    one = signing.signed("router")
    files = ListenTls(one.certificate, one.key)
    context, app = load_tls(files), create_app(served.services, SETTINGS)
    with bind_sockets() as sockets:
        async with serve_app(app, sockets, tls=context) as url:

            async def serial() -> object:
                for path, body in (("/health", None), (CHAT, chat(stream=True))):
                    asked = served.client.request(
                        "GET" if body is None else "POST",
                        url + path,
                        json=body,
                        headers=BOB,
                        ssl=signing.trusting,
                    )
                    async with asked as answer:
                        assert answer.status == 200 and await answer.read()
                host, port = url.removeprefix("https://").split(":")
                _, writer = await asyncio.open_connection(host, int(port), ssl=signing.trusting)
                writer.close()
                certificate: dict[str, object] = writer.get_extra_info("peercert")
                return certificate["serialNumber"]

            before = await serial()
            key = files.key.read_bytes()
            signing.signed("router")
            new_key = files.key.read_bytes()
            files.key.write_bytes(key)
            with pytest.raises(ConfigError, match=r"listen\.tls"):
                renew_certificate(context, files)  # half of it is here
            assert await serial() == before
            files.key.write_bytes(new_key)
            renew_certificate(context, files)
            assert await serial() != before
            with pytest.raises((ssl.SSLError, OSError)):
                await asyncio.open_connection(
                    *url.removeprefix("https://").split(":"), ssl=UNKNOWING
                )


@pytest.mark.parametrize("model", ["small", "duo"])
@pytest.mark.parametrize("route", [CHAT, "/v1/responses"])
@pytest.mark.parametrize(
    ("key", "asked", "given"),
    [
        (GWEN, {"service_tier": "priority"}, "priority"),
        (GWEN, {"service_tier": "auto"}, "default"),
        (GWEN, {}, "default"),
        (BOB, {"service_tier": "priority"}, "default"),
        (BOB, {"service_tier": "flex"}, "flex"),
        (FRED, {"service_tier": "default"}, "flex"),
        (FRED, {}, "flex"),
    ],
)
async def test_requests_have_the_class_they_ask_for_as_far_as_their_key_allows(
    served: Api,
    model: str,
    route: str,
    key: dict[str, str],
    asked: dict[str, str],
    given: str,
) -> None:
    body = chat(model=model, **asked)
    if route == "/v1/responses":
        body["input"] = body.pop("messages")
    for engine in served.moa.engines.values():
        engine.generated.clear()
    async with served.client.post(served.url + route, json=body, headers=key) as answer:
        assert answer.status == 200
        is_lowered = asked.get("service_tier", given) not in (given, "auto")
        assert ("service_tier" in answer.headers.get("x-ignored-fields", "")) == is_lowered
    engines = served.moa.engines.values()
    assert {one.hints.tier for engine in engines for one in engine.generated} == {given}


async def test_chats_that_an_engine_answers_itself_have_their_class_too() -> None:
    relay = ScriptedRelay(chat=ChatServing())
    keys = {"gwen": ApiKey(key="sk-g", service_tier="priority"), "bob": "sk-b"}
    async with api(settings=ApiSettings(keys=keys), relays={"small": relay}) as running:
        body = chat(model="small", logprobs=True, service_tier="priority")
        for key in (GWEN, BOB):
            assert (await running.post(CHAT, body, **key))[0] == 200
    assert relay.tiers == ["priority", "default"]
