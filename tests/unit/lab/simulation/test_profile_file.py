from pathlib import Path

import pytest

from shell_router.errors import ConfigError
from shell_router.lab.simulation.profiling import (
    Amount,
    ProfiledCosts,
    require_extensible,
    write_profile,
)
from shell_router.lab.simulation.settings import load_profiles
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    PairCosts,
    PrefillCosts,
    TransferCosts,
)

COSTS = PairCosts(
    PrefillCosts(0.002, 2e-5, 4e-11, chunk_tokens=512, prompts=1),
    DecodeCosts(0.001, 5e-5),
    TransferCosts(0.0015, 5e-6),
)
BY_HAND = """# mine
# and this
gpus: {}
models:
  old:
    prefill: {forward_s: 1.0, token_s: 1.0}
    decode: {step_s: 1.0}
  roof: {prefill: {forward_s: 2.0, token_s: 1.0}, decode: {step_s: 1.0}}
"""


def measured(file: Path, model: str) -> None:
    found = ProfiledCosts(COSTS, {"prefill": 0.031, "decode": 0.05})
    write_profile(file, model, found, Amount(), "2026-01-31 on embedded pair, cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "profiles.yaml"


def test_a_profile_is_read_back_as_it_was_measured(file: Path) -> None:
    measured(file, "small")
    assert load_profiles(file).models["small"].costs({}) == COSTS


def test_the_file_says_what_was_measured_when_and_how_well_it_fits(file: Path) -> None:
    measured(file, "small")
    said = load_profiles(file).models["small"].measured
    assert said.startswith("2026-01-31 on embedded pair, cpu: medians of 5 rounds")
    assert said.endswith("prefill 3.1%, decode 5.0%")


def test_other_values_and_the_comments_at_the_head_stay(file: Path) -> None:
    file.write_text(BY_HAND, encoding="utf-8")
    before = load_profiles(file)
    measured(file, "new")
    after = load_profiles(file)
    assert file.read_text(encoding="utf-8").startswith("# mine\n# and this\ngpus: {}\nmodels:\n")
    assert after.gpus == before.gpus and list(after.models) == ["old", "roof", "new"]
    assert all(after.models[name] == before.models[name] for name in before.models)


@pytest.mark.parametrize("model", ["old", "roof"])
def test_a_model_that_is_measured_again_replaces_itself_alone(file: Path, model: str) -> None:
    file.write_text(BY_HAND, encoding="utf-8")
    measured(file, model)
    models = load_profiles(file).models
    assert list(models) == ["old", "roof"]
    assert [name for name in models if models[name].costs({}) == COSTS] == [model]


def test_measuring_twice_leaves_the_file_as_measuring_once(file: Path) -> None:
    measured(file, "small")
    once = file.read_text(encoding="utf-8")
    measured(file, "small")
    assert file.read_text(encoding="utf-8") == once


def test_a_name_that_yaml_would_read_as_something_else_is_kept(file: Path) -> None:
    measured(file, "1e3")
    assert list(load_profiles(file).models) == ["1e3"]


def test_a_file_that_holds_no_profiles_is_refused_before_anything_is_measured(file: Path) -> None:
    file.write_text("modles: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="Unknown key 'modles'"):
        require_extensible(file)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(file: Path) -> None:
    with pytest.raises(ConfigError, match="folder that is there"):
        require_extensible(file.parent / "nowhere" / "profiles.yaml")
    require_extensible(file)
