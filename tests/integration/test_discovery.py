"""Deployments that are written from what running servers say of themselves."""

import asyncio
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from shell_router.app import load_config
from shell_router.app.discovery import (
    Api,
    Found,
    FoundEngine,
    FoundModel,
    ask_servers,
    write_deployment,
)
from shell_router.errors import ConfigError
from tests.fakes.command import running_command
from tests.fakes.openai_server import OpenAIServer
from tests.fakes.pairs_under_test import embedded_servers

MODELS = Path(__file__).parents[2] / "models"


def found(model: str, mode: str = "null", port: int = 1) -> FoundEngine:
    return FoundEngine(f"http://127.0.0.1:{port}", model, MODELS / "small", mode, 8998)


async def test_one_command_serves_the_shipped_topologies_over_servers_that_run(
    tmp_path: Path,
) -> None:
    with embedded_servers(MODELS / "large", tmp_path) as pair:
        engines = ("--engine", pair.prefill.url, "--engine", pair.decode.url + "/")
        async with running_command("serve", *engines, "--port", "0") as command:
            assert (await command.line_with("Models:", limit_s=60)).split() == (
                ["Models:", "large,", "small,", "medium"]
            )
            line = (await command.line_with("Ask: curl", limit_s=60)).partition(": ")[2]
            curl = await asyncio.create_subprocess_shell(f"{line} -s", stdout=subprocess.PIPE)
            body, _ = await curl.communicate()
        assert json.loads(body)["choices"][0]["message"]["content"]

        folder = tmp_path / "mine"
        async with running_command("init", folder, *engines) as command:
            code, output = await command.ended(limit_s=60)
        assert (code, "serve --config configs/engines.yaml" in output) == (0, True)
        written = (folder / "configs" / "engines.yaml").read_text(encoding="utf-8")
        assert yaml.safe_load(written)["topologies"] == ["../topologies"]
        model = yaml.safe_load(written)["models"]["small"]
        assert Path(model["path"]) == MODELS / "large"
        assert model["pairs"] == [
            {
                "prefill": pair.prefill.url,
                "decode": pair.decode.url,
                "bootstrap_port": pair.bootstrap_port,
            }
        ]


def write(found: Sequence[Found], folder: Path) -> dict[str, Any]:
    file = folder / "deployment.yaml"
    write_deployment(found, file)
    written: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return written


def test_the_largest_model_by_its_name_is_large(tmp_path: Path) -> None:
    servers = [found("Qwen3-14B", port=1), found("Qwen3-0.6B", port=2), found("my-800m", port=3)]
    models = write([*servers, found("Qwen3-14B", port=4)], tmp_path)["models"]
    assert models["small"] == models["Qwen3-0.6B"]
    assert models["medium"] == models["my-800m"]
    assert models["large"] == models["Qwen3-14B"]
    assert models["large"]["servers"] == ["http://127.0.0.1:1", "http://127.0.0.1:4"]


def test_a_prefill_server_without_a_decode_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 prefill, 0 decode"):
        write([found("m", "prefill")], tmp_path)


async def test_models_of_an_openai_server_are_served_with_a_tree_without_early_exit(
    tmp_path: Path,
) -> None:
    with embedded_servers(MODELS / "small", tmp_path) as pair:
        engines = ("--engine", pair.prefill.url, "--engine", pair.decode.url)
        async with running_command("serve", *engines, "--port", "0") as other:
            api = (await other.line_with("Serving on", limit_s=60)).split()[-1] + "/v1"
            async with running_command("serve", "--openai", api, "--port", "0") as command:
                assert "large" in await command.line_with("Models:", limit_s=60)
                url = (await command.line_with("Serving on", limit_s=60)).split()[-1]
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
                    answer = await client.chat.completions.create(
                        model="tree-9-3-1",
                        messages=[{"role": "user", "content": "Why?"}],
                        max_tokens=8,
                    )
    assert answer.choices[0].message.content


def test_a_key_is_named_by_its_variable_and_never_written(tmp_path: Path) -> None:
    written = write([FoundModel("http://127.0.0.1:1/v1", "m", "MY_KEY")], tmp_path)
    assert written["models"]["m"]["openai"] == {
        "url": "http://127.0.0.1:1/v1",
        "model": "m",
        "key": {"env": "MY_KEY"},
    }
    assert load_config(tmp_path / "deployment.yaml", {"MY_KEY": "secret"}).models["large"]


async def ask_api(server: OpenAIServer, *chosen: str) -> list[str]:
    async with server.running():
        return [each.model for each in await ask_servers([], [Api(server.url)], chosen)]


HUNDREDS = [f"maker/model-{number}" for number in range(400)]


@pytest.mark.parametrize(
    ("server", "chosen", "problem"),
    [
        (OpenAIServer([], models=HUNDREDS), (), "400 models .* Name those .* with --openai-model"),
        (OpenAIServer([], models=HUNDREDS), ("model",), "no --openai server lists .* 'model'"),
        (OpenAIServer([]), (), "lists 0 models .* with --openai-model"),
        (OpenAIServer([], models="<html>"), (), "not JSON. Start it, or name the URL before"),
        (OpenAIServer([], models_status=401), (), "status 401 .* with --openai-key-env"),
        (OpenAIServer([], models_status=404), (), "status 404 .* mostly ends with /v1"),
    ],
)
async def test_a_server_that_cannot_be_served_so_is_refused_with_what_to_do(
    server: OpenAIServer, chosen: Sequence[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        await ask_api(server, *chosen)


async def test_models_are_chosen_by_name_also_of_a_server_that_lists_none() -> None:
    assert await ask_api(OpenAIServer([], models=HUNDREDS), HUNDREDS[7]) == [HUNDREDS[7]]
    assert await ask_api(OpenAIServer([]), "unlisted") == ["unlisted"]


async def test_models_that_do_not_chat_by_their_names_are_left_out_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listed = OpenAIServer([], models=["nomic-embed-text", "bge-m3", "qwen3:8b"])
    assert await ask_api(listed) == ["qwen3:8b"]
    assert "lists bge-m3, nomic-embed-text, left out" in caplog.text
    assert await ask_api(listed, "bge-m3") == ["bge-m3"]


def test_names_that_are_taken_get_a_number_and_paths_their_last_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["auto", "tree-9-3-1", "m", "/models/m", "qwen3:8b"]
    written = write(
        [FoundModel(f"http://127.0.0.1:{port}/v1", name) for port, name in enumerate(names, 1)],
        tmp_path,
    )
    asked = {
        name: settings["openai"]["model"]
        for name, settings in written["models"].items()
        if name not in ("small", "medium", "large")
    }
    assert asked == dict(
        zip(["auto-2", "tree-9-3-1-2", "m", "m-2", "qwen3:8b"], names, strict=True)
    )
    assert "its model 'auto' is named 'auto-2' here" in caplog.text
    assert load_config(tmp_path / "deployment.yaml", {}).models["auto-2"]


async def test_a_url_where_no_engine_answers_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"http://127.0.0.1:9/server_info does not .*: nothing listens there"
    ):
        await ask_servers(["http://127.0.0.1:9"])


async def test_a_file_and_engines_together_are_refused(tmp_path: Path) -> None:
    both = ("--config", "configs/embedded.yaml", "--engine", "http://127.0.0.1:9")
    async with running_command("serve", *both) as command:
        code, output = await command.ended(limit_s=30)
    assert (code, "given together" in output) == (2, True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--openai-model", "m"), "is given without --openai"),
        (
            ("--openai", "http://a/v1", "--openai", "http://b/v1", "--openai-key-env", "KEY_OF_A"),
            "--openai-key-env is given 1 times, and --openai 2 times",
        ),
    ],
)
async def test_a_key_or_a_model_without_its_server_is_refused(
    options: Sequence[str], problem: str
) -> None:
    async with running_command("serve", *options) as command:
        code, output = await command.ended(limit_s=30)
    assert (code, problem in output) == (2, True)


async def test_init_leaves_no_folder_where_no_engine_answers(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    async with running_command("init", folder, "--engine", "http://127.0.0.1:9") as command:
        code, output = await command.ended(limit_s=30)
    assert (code, "does not say" in output, folder.exists()) == (2, True, False)
