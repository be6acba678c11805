from pathlib import Path

import pytest

from shell_router.errors import ConfigError
from shell_router.lab.simulation.profile import Measured, require_extensible, write_profile
from shell_router.lab.simulation.profiling import Amount, ProfiledCosts
from shell_router.lab.simulation.settings import load_profiles
from shell_router.standins.simulated import DecodeCosts, PairCosts, PrefillCosts, TransferCosts

COSTS = PairCosts(
    PrefillCosts(0.002, 2e-5, 4e-11, chunk_tokens=512, prompts=1), DecodeCosts(0.001, 5e-5), TransferCosts(0.0015, 5e-6)
)
MEASURED = Measured(ProfiledCosts(COSTS, 0.031, None, 0.05), Amount(), "embedded pair, cpu", "2026-01-31")
BY_HAND = """# mine
gpus: {}
models:
  old:  # careful
    prefill: {forward_s: 1.0, token_s: 1.0}
    decode: {step_s: 1.0}

  # about the roof
  roof:
    prefill: {forward_s: 2.0, token_s: 1.0}
    decode: {step_s: 1.0}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "profiles.yaml"


def test_a_profile_is_read_back_as_it_was_measured(file: Path) -> None:
    write_profile(file, "small", MEASURED)
    assert load_profiles(file).models["small"].costs({}) == COSTS


def test_the_file_says_what_was_measured_when_and_how_well_it_fits(file: Path) -> None:
    write_profile(file, "small", MEASURED)
    text = file.read_text(encoding="utf-8")
    assert "measured 2026-01-31 on embedded pair, cpu: medians of 5 rounds" in text
    assert "prefill 3.1%, decode 5.0%" in text


def test_other_models_and_what_is_said_of_them_stay(file: Path) -> None:
    file.write_text(BY_HAND, encoding="utf-8")
    write_profile(file, "new", MEASURED)
    assert file.read_text(encoding="utf-8").startswith(BY_HAND)
    assert set(load_profiles(file).models) == {"old", "roof", "new"}


@pytest.mark.parametrize("model", ["old", "roof"])
def test_a_model_that_is_measured_again_replaces_itself_alone(file: Path, model: str) -> None:
    file.write_text(BY_HAND, encoding="utf-8")
    write_profile(file, model, MEASURED)
    models = load_profiles(file).models
    assert list(models) == ["old", "roof"]
    assert models[model].costs({}) == COSTS
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# mine\ngpus: {}\nmodels:\n  old:")
    assert "\n\n  # about the roof\n  roof:" in text
    assert len([name for name in models if models[name].costs({}) != COSTS]) == 1


@pytest.mark.parametrize("between", ["\n", "  # the other half\n", "# far out\n"])
@pytest.mark.parametrize("model", ["roof", "third"])
def test_what_stands_between_a_models_lines_does_not_end_it(file: Path, between: str, model: str) -> None:
    half = "  roof:\n    prefill: {forward_s: 2.0, token_s: 1.0}\n"
    file.write_text(f"models:\n{half}{between}    decode: {{step_s: 1.0}}\n", encoding="utf-8")
    write_profile(file, model, MEASURED)
    models = load_profiles(file).models
    assert list(models) == list(dict.fromkeys(["roof", model]))
    assert models[model].costs({}) == COSTS


def test_measuring_twice_leaves_the_file_as_measuring_once(file: Path) -> None:
    write_profile(file, "small", MEASURED)
    once = file.read_text(encoding="utf-8")
    write_profile(file, "small", MEASURED)
    assert file.read_text(encoding="utf-8") == once


def test_a_name_that_yaml_would_read_as_something_else_is_kept(file: Path) -> None:
    write_profile(file, "1e3", MEASURED)
    assert list(load_profiles(file).models) == ["1e3"]


def test_a_file_with_other_sections_after_its_models_keeps_them_apart(file: Path) -> None:
    file.write_text(
        "models:\n  a:\n    prefill: {forward_s: 1.0, token_s: 1.0}\n    decode: {step_s: 1.0}\ngpus: {}", "utf-8"
    )
    write_profile(file, "small", MEASURED)
    assert file.read_text(encoding="utf-8").endswith("\ngpus: {}")
    assert list(load_profiles(file).models) == ["a", "small"]


def test_models_in_one_line_are_not_torn_apart(file: Path) -> None:
    file.write_text("models: {a: {prefill: {forward_s: 1.0, token_s: 1.0}, decode: {step_s: 1.0}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lines of their own.*another file"):
        require_extensible(file)


def test_a_file_that_holds_no_profiles_is_refused_before_anything_is_measured(file: Path) -> None:
    file.write_text("modles: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="Unknown key 'modles'"):
        require_extensible(file)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(file: Path) -> None:
    with pytest.raises(ConfigError, match="folder that is there"):
        require_extensible(file.parent / "nowhere" / "profiles.yaml")
    require_extensible(file)
