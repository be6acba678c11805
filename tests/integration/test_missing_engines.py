"""A router with one model whose engines are not there: it serves the others, says so, and takes the
model in later.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Literal

import aiohttp
import orjson
import pytest

from benchmarks.scripted.http import Exchange
from benchmarks.scripted.server import (
    BootstrapRooms,
    ScriptedPair,
    ScriptedServer,
    ScriptedSettings,
)
from launch.sglang_cpu.pair import free_ports
from shell_router.app import serve_deployment
from shell_router.config import (
    Config,
    EmbedderSettings,
    Limits,
    Listen,
    ListenTls,
    ModelSettings,
    PairSettings,
)
from shell_router.config.settings import AccessLogSettings
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.errors import ConfigError, EngineStalled
from tests.fakes.api_server import Api, chat, until
from tests.fakes.certificates import authority
from tests.fakes.moa import ScriptedMoa

MODEL = Path(__file__).parents[2] / "models" / "small"
SERVERS = ScriptedSettings(vocabulary=30)


def deployment(**pairs: tuple[str, str]) -> Config:
    models = {
        alias: ModelSettings(MODEL, pairs=(PairSettings(*urls),)) for alias, urls in pairs.items()
    }
    limits = Limits(engine_start_s=0.5, engine_attempts=1)
    return Config(models, embedder=EmbedderSettings("none"), listen=Listen(port=0), limits=limits)


async def test_the_other_models_are_served_until_the_missing_engines_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ports = free_ports(2)
    prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
    late = ScriptedPair(SERVERS)
    async with ScriptedPair(SERVERS) as there, aiohttp.ClientSession() as client:
        config = deployment(small=(there.prefill.url, there.decode.url), large=(prefill, decode))
        lines: list[str] = []
        async with serve_deployment(config, on_progress=lines.append) as url:
            assert "model large is missing" in caplog.text
            at = Api(url, ScriptedMoa(), None, client)  # type: ignore[arg-type] # only its client is used
            status, body = await at.get("/ready")
            assert (status, body["ready"], body["degraded"]) == (200, True, ["engine large"])
            _, listed = await at.get("/v1/models")
            ready = {one["id"]: one["ready"] for one in listed["data"] if one["kind"] == "model"}
            assert ready == {"small": True, "large": False}
            asked = {"max_tokens": 4, "include_agents": True}
            assert (await at.post("/v1/chat/completions", chat(model="small", **asked)))[0] == 200
            assert (await at.post("/v1/chat/completions", chat(model="large", **asked)))[0] in (
                502,
                503,
            )
            panel = {"models": ["small", "large"], "judge": "large", "quorum": 1}
            status, body = await at.post("/v1/chat/completions", chat(fusion=panel, **asked))
            assert status == 200
            assert {name: (one["model"], one["state"]) for name, one in body["agents"].items()} == {
                "panel-1": ("small", "finished"),
                "panel-2": ("large", "failed"),
                "judge": ("small", "finished"),
            }
            await late.prefill.start(ports[0])
            await late.decode.start(ports[1])
            try:
                await until(lambda: any(line.startswith("model large is ready") for line in lines))
                assert (await at.get("/ready"))[1]["degraded"] == []
                assert (await at.post("/v1/chat/completions", chat(model="large", **asked)))[
                    0
                ] == 200
            finally:
                await late.prefill.stop()
                await late.decode.stop()
            await there.prefill.stop()
            assert (await at.get("/ready"))[0] == 503
            assert not (await at.get("/v1/models/small"))[1]["ready"]


async def test_a_deployments_file_of_keys_certificate_and_access_log_are_served(
    tmp_path: Path,
) -> None:
    signing = authority(tmp_path)
    own = signing.signed("router")
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "api_keys: {alice: {key: sk-a, models: [small]}, ops: {key: sk-o, operator: on}}\n"
    )
    async with ScriptedPair(SERVERS) as there, aiohttp.ClientSession() as client:
        config = replace(
            deployment(small=(there.prefill.url, there.decode.url)),
            listen=Listen(port=0, tls=ListenTls(own.certificate, own.key)),
            api_keys_file=keys,
            access_log=AccessLogSettings(tmp_path / "log"),
        )
        async with serve_deployment(config) as url:
            for key, path, status in (
                ("o", "/metrics", 200),
                ("a", "/metrics", 403),
                ("x", "/v1/models", 401),
            ):
                headers = {"Authorization": f"Bearer sk-{key}"}
                async with client.get(url + path, headers=headers, ssl=signing.trusting) as answer:
                    assert answer.status == status
        keys.write_text("api_keys: {}\n")
        with pytest.raises(ConfigError, match=r"keys\.yaml"):
            async with serve_deployment(config):
                pass
    (log,) = await asyncio.to_thread(lambda: [*(tmp_path / "log").iterdir()])
    assert [orjson.loads(line)["tenant"] for line in log.read_bytes().splitlines()] == [
        "ops",
        "alice",
        None,
    ]


@pytest.mark.parametrize("wrong", ["keys", "certificate"])
async def test_a_wrong_file_of_keys_or_certificate_shows_before_anything_is_started(
    tmp_path: Path, wrong: str
) -> None:
    config = deployment(small=("http://127.0.0.1:1", "http://127.0.0.1:2"))
    none, lines = tmp_path / "none", list[str]()
    if wrong == "keys":
        config = replace(config, api_keys_file=none)
    else:
        config = replace(config, listen=Listen(port=0, tls=ListenTls(none, none)))
    with pytest.raises(ConfigError, match="none"):
        async with serve_deployment(config, on_progress=lines.append):
            pass
    assert not lines


class Tokenizing(ScriptedServer):
    """A server that tells its tokenizer's ids, as SGLang's do."""

    def __init__(self, role: Literal["prefill", "decode"], rooms: BootstrapRooms) -> None:
        super().__init__(replace(SERVERS, role=role), rooms=rooms)
        self.tokenizer = HfTokenizer.from_folder(MODEL, {})
        self._routes[b"/tokenize"] = self._tokenize

    def _tokenize(self, exchange: Exchange) -> None:
        body = orjson.loads(exchange.body)
        assert body["add_special_tokens"] is False
        exchange.answer_json({"tokens": self.tokenizer.encode(body["prompt"])})


class Shifted(HfTokenizer):
    """A tokenizer of other ids."""

    def encode(self, text: str) -> list[int]:
        return [token + 1 for token in super().encode(text)]


async def test_a_server_with_another_tokenizer_than_the_models_folder_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rooms = BootstrapRooms()
    async with Tokenizing("prefill", rooms) as prefill, Tokenizing("decode", rooms) as decode:
        for tokenizer, warnings in (
            (HfTokenizer.from_folder(MODEL, {}), 0),
            (Shifted.from_folder(MODEL, {}), 1),
        ):
            decode.tokenizer = tokenizer
            async with serve_deployment(deployment(small=(prefill.url, decode.url))):
                lines = [line for line in caplog.messages if "tokenizes otherwise" in line]
            assert len(lines) == warnings
        assert decode.url in lines[0]


async def test_a_router_none_of_whose_models_has_engines_does_not_start() -> None:
    nothing = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    config = deployment(small=nothing, large=nothing)
    config = replace(config, limits=replace(config.limits, engine_start_s=0.1))
    with pytest.raises(
        EngineStalled, match=r"of small, large .* within 0\.1 s: .*127\.0\.0\.1:1: .*; .*:1: "
    ):
        async with serve_deployment(config):
            pass
