"""Deployments that are written from what running servers say of themselves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from shell_router.app import load_config
from shell_router.app.discovery import Found, FoundEngine, FoundModel, ask_servers, write_deployment
from shell_router.errors import ConfigError
from tests.fakes.command import running_command
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
            url = (await command.line_with("Serving on", limit_s=60)).split()[-1]
            await command.line_with("Ask: curl", limit_s=10)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
                answer = await client.chat.completions.create(
                    model="tree-9-3-1", messages=[{"role": "user", "content": "Why?"}], max_tokens=8
                )
        assert answer.choices[0].message.content

        folder = tmp_path / "mine"
        async with running_command("init", folder, *engines) as command:
            code, output = await command.ended(limit_s=60)
        assert (code, "serve --config configs/engines.yaml" in output) == (0, True)
        written = (folder / "configs" / "engines.yaml").read_text(encoding="utf-8")
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


async def test_a_url_where_no_engine_answers_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"http://127.0.0.1:9/server_info does not say what it serves"
    ):
        await ask_servers(["http://127.0.0.1:9"])


async def test_a_file_and_engines_together_are_refused(tmp_path: Path) -> None:
    both = ("--config", "configs/embedded.yaml", "--engine", "http://127.0.0.1:9")
    async with running_command("serve", *both) as command:
        code, output = await command.ended(limit_s=30)
    assert (code, "given together" in output) == (2, True)


async def test_init_leaves_no_folder_where_no_engine_answers(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    async with running_command("init", folder, "--engine", "http://127.0.0.1:9") as command:
        code, output = await command.ended(limit_s=30)
    assert (code, "does not say" in output, folder.exists()) == (2, True, False)
