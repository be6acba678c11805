"""`shell-router launch`: one YAML file, engines and router; the engines here are those of the
embedded pair.
"""

import os
import re
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from launch.sglang_cpu.pair import free_ports
from shell_router.app import load_config
from shell_router.app.launching import launch_engines, plan_launch
from shell_router.cli import main
from shell_router.errors import EngineUnreachable
from tests.fakes import embedded_as_sglang
from tests.fakes.command import RunningCommand, running_command, survivors
from tests.fakes.fake_engine import interpreter

ROOT = Path(__file__).parents[2]
TREE = "name: trio\ntree: {shape: [2, 1], models: [small, large]}\nearly_exit: off\n"
DEPLOYMENT = """
listen: {{port: 0}}
models:
  small: &model
    path: {model}
    pairs:
      - {{prefill: "http://127.0.0.1:{}", decode: "http://127.0.0.1:{}", bootstrap_port: {}, launch: {{}}}}
  large: *model
embedder: {{model: hash}}
topologies: [trio.yaml]
launch: {{python: {python}, folder: run, restart_delay_s: 0.01}}
"""
QUESTION = {
    "messages": [{"role": "user", "content": "Why?"}],
    "max_tokens": 8,
    "ignore_eos": True,
    "stream": True,
}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    (tmp_path / "trio.yaml").write_text(TREE, encoding="utf-8")
    file = tmp_path / "router.yaml"
    python = interpreter(tmp_path, Path(embedded_as_sglang.__file__))
    file.write_text(
        DEPLOYMENT.format(*free_ports(3), python=python, model=ROOT / "models" / "small"),
        encoding="utf-8",
    )
    return file


async def streamed(url: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json={"model": "trio", **QUESTION}) as answer,
    ):
        return await answer.text()


async def metric(url: str, name: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        found = re.search(rf"^{re.escape(name)} (.+)$", await answer.text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


async def serving(command: RunningCommand) -> str:
    return (await command.line_with("Serving on", limit_s=120)).split()[-1]


@linux
@pytest.mark.slow
async def test_one_file_gives_an_answer_outlives_a_dead_engine_and_leaves_nothing(
    deployment: Path,
) -> None:
    async with running_command("launch", "--config", deployment) as command:
        url = await serving(command)
        assert (await streamed(url)).rstrip().endswith("data: [DONE]")
        os.kill(command.engine("decode"), signal.SIGKILL)
        await command.line_with("small/decode ended with code -9", limit_s=60)
        await command.line_with("small/decode: ready after", limit_s=60)
        assert (await streamed(url)).rstrip().endswith("data: [DONE]")
        assert (
            await metric(url, 'shell_router_engine_restarts_total{engine="small/decode"}') == "1.0"
        )
        assert (
            await metric(url, 'shell_router_engine_restarts_total{engine="small/prefill"}') == "0.0"
        )
        started = command.started()
        command.signal(signal.SIGTERM)
        code, output = await command.ended(limit_s=60)
        assert (code, survivors(started)) == (0, set()), output


@linux
@pytest.mark.slow
async def test_launch_killed_outright_takes_its_engines_along(deployment: Path) -> None:
    async with running_command("launch", "--config", deployment, "--engines-only") as command:
        await command.line_with("all engines serve", limit_s=120)
        started = command.started()
        assert len(started) >= 2
        command.kill()
        assert survivors(started) == set()


@linux
@pytest.mark.slow
async def test_ctrl_c_while_engines_start_leaves_nothing(deployment: Path) -> None:
    async with running_command("launch", "--config", deployment) as command:
        await command.line_with("small/decode: started", limit_s=60)
        started = command.started()
        command.signal(signal.SIGINT)
        code, output = await command.ended(limit_s=60)
        assert (code, survivors(started)) == (130, set()), output
        assert "Traceback" not in output


def test_a_dry_run_prints_every_command_and_runs_none(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--config", str(deployment), "--dry-run"]) == 0
    prefill, decode, router = capsys.readouterr().out.splitlines()
    assert "--disaggregation-mode prefill" in prefill
    assert decode.startswith("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL=2 ")
    assert router == f"shell-router serve --config {deployment}"
    assert not (deployment.parent / "run").exists()


def test_a_port_that_something_listens_on_is_one_line_with_a_remedy(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = int(re.findall(r"127\.0\.0\.1:(\d+)", deployment.read_text(encoding="utf-8"))[1])
    with socket.create_server(("127.0.0.1", taken)):
        assert main(["launch", "--config", str(deployment)]) == 2
    error = capsys.readouterr().err
    assert f"small/decode cannot listen on 127.0.0.1, port {taken}: Address already in use" in error
    assert "Stop what listens there" in error


def test_engines_may_listen_on_ipv6_and_a_taken_port_is_known_there(deployment: Path) -> None:
    text = deployment.read_text(encoding="utf-8").replace("127.0.0.1", "[::1]")
    deployment.write_text(text, encoding="utf-8")
    planned = plan_launch(load_config(deployment, {}), "ipv6", None, {})
    try:
        taken = socket.create_server(("::1", planned.engines[1].ports[0]), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with (
        taken,
        pytest.raises(EngineUnreachable, match=r"cannot listen on ::1, .* Address already in use"),
    ):
        launch_engines(planned)
    launch_engines(planned)


@pytest.mark.parametrize("wrong", ["profile.yaml", "trio.yaml"])
def test_a_wrong_file_of_the_router_is_reported_before_an_engine_is_started(
    deployment: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    text = deployment.read_text(encoding="utf-8") + "auto: {profile: profile.yaml}\n"
    deployment.write_text(text, encoding="utf-8")
    (deployment.parent / wrong).write_text(
        "name: neither a topology nor a profile\n", encoding="utf-8"
    )
    assert main(["launch", "--config", str(deployment)]) == 2
    assert str(deployment.parent / wrong) in capsys.readouterr().err
    assert not (deployment.parent / "run").exists(), "it holds the logs of engines"


def test_machines_without_a_router_need_no_api_keys(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = deployment.read_text(encoding="utf-8") + "api_keys: {team: {env: NOT_SET_ANYWHERE}}\n"
    deployment.write_text(text, encoding="utf-8")
    assert main(["launch", "--config", str(deployment), "--engines-only", "--dry-run"]) == 0
    assert "shell-router serve" not in capsys.readouterr().out


def test_an_interpreter_that_is_not_there_is_one_line_with_a_remedy(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (deployment.parent / "as-embedded_as_sglang").unlink()
    assert main(["launch", "--config", str(deployment)]) == 2
    error = capsys.readouterr().err
    assert "is not a program that can be run. Correct launch.python" in error
