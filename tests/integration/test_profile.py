"""`shell-router profile` on an embedded pair, from a deployment's file to profiles that a
simulation reads.
"""

import asyncio
from pathlib import Path

import pytest

from shell_router.cli import main
from shell_router.lab.simulation.settings import load_profiles
from tests.fakes.command import running_command, survivors

SMALL = Path(__file__).parents[2] / "models" / "small"
CONFIG = f"models: {{tiny: {{path: {SMALL}}}, other: {{path: {SMALL}}}}}\n"
QUICK = ("--rounds", "1", "--lengths", "16,64,128", "--batches", "1,2,4", "--new-tokens", "16")
KEPT = "models:\n  kept:\n    prefill: {forward_s: 1.0, token_s: 1.0}\n    decode: {step_s: 1.0}\n"


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    file = tmp_path / "router.yaml"
    file.write_text(CONFIG, encoding="utf-8")
    return file


@pytest.mark.slow
async def test_a_deployments_models_are_measured_into_a_file_that_simulations_read(
    deployment: Path,
) -> None:
    out = deployment.with_name("profiles.yaml")
    out.write_text(KEPT, encoding="utf-8")
    async with running_command(
        "profile", deployment, "--out", out, "--models", "tiny", *QUICK
    ) as command:
        await command.line_with("measuring tiny", limit_s=120)
        started = command.started()
        code, printed = await command.ended(limit_s=120)
    assert code == 0, printed
    assert not await asyncio.to_thread(survivors, started)
    profiles = load_profiles(out)
    assert list(profiles.models) == ["kept", "tiny"]
    costs = profiles.models["tiny"].costs({})
    assert (costs.prefill.chunk_tokens, costs.prefill.prompts, costs.decode.max_batch_size) == (
        512,
        1,
        32,
    )
    assert costs.prefill.pass_s(64, 2080) > 0
    assert costs.decode.steps_s(1, 1, 64) > 0


def test_a_model_that_the_deployment_lacks_is_refused(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(deployment.with_name("profiles.yaml"))
    assert main(["profile", str(deployment), "--out", out, "--models", "tiny,huge"]) == 2
    assert (
        capsys.readouterr().err
        == "shell-router: The deployment has no model huge. Choose from: tiny, other.\n"
    )


def test_an_output_that_cannot_be_written_is_refused_before_anything_starts(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(deployment), "--out", str(deployment.parent)]) == 2
    assert "cannot be written" in capsys.readouterr().err
