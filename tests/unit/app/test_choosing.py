"""What a deployment says of its models' costs reaches the choice."""

from pathlib import Path
from time import monotonic

import pytest

from shell_router.app.services import build_chooser, read_named
from shell_router.config import AutoSettings, Config, ModelSettings, PairSettings
from shell_router.core.events import ModelChosen
from shell_router.core.predictors import Forecast
from shell_router.errors import ConfigError
from shell_router.standins.embedded.settings import EmbeddedSection
from tests.fakes.moa import Recorder, ScriptedMoa

PAIR = PairSettings("http://127.0.0.1:1", "http://127.0.0.1:2")
MODELS = {
    "small": ModelSettings(
        Path("small"), engine={"embedded": EmbeddedSection(max_running_requests=8)}
    ),
    "large": ModelSettings(path=Path("large"), pairs=(PAIR,)),
}
PROFILE = """
models:
  small: {decode: {step_s: 0.002, sequence_s: 0.001}}
  large: {decode: {step_s: 0.05}, prefill: {}}
"""


def waits(auto: AutoSettings) -> ModelChosen:
    """The choice that is reported while each model has 80 tokens to write."""
    moa, chosen = ScriptedMoa(), Recorder()
    served = {name: moa.models[name] for name in MODELS}
    config = Config(models=MODELS, auto=auto)
    _, _, costs = read_named(config)
    chooser = build_chooser(config, costs, served, {"small": 8, "large": 32}, None, monotonic)
    with chooser.activity.enter_program({name: (name, 80.0) for name in MODELS}):
        chooser.choose(("a",), ("small", "large"), Forecast(), 0.0, chosen.emit)
    return chosen.of(ModelChosen)[0]


def test_a_profile_tells_what_a_token_costs_with_a_full_batch(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(PROFILE, encoding="utf-8")
    chosen = waits(AutoSettings(profile=file))
    assert chosen.waits == {
        "small": pytest.approx(80 * 0.010 / 8),
        "large": pytest.approx(80 * 0.05 / 32),
    }
    assert chosen.unmeasured == ()
    fuller = waits(AutoSettings(profile=file, max_batch={"large": 64}))
    assert fuller.waits["large"] == pytest.approx(80 * 0.05 / 64)


def test_without_a_profile_costs_are_measured_and_tokens_compared_until_then() -> None:
    chosen = waits(AutoSettings())
    assert chosen.waits == {"small": 10.0, "large": 2.5}
    assert chosen.unmeasured == ("small", "large")


@pytest.mark.parametrize(
    "content", [None, "models: [", "models: {}", "models: {small: {roofline: {}}}", "[]"]
)
def test_a_profile_that_tells_no_costs_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "profile.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"profile\.yaml"):
        waits(AutoSettings(profile=file))
