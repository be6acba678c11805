"""What is compared, and with what."""

import pytest

from shell_router.errors import ConfigError, UnknownModel
from shell_router.lab.evaluation.records import Setting
from shell_router.lab.evaluation.run import choose_baseline, choose_settings

SERVED = [Setting("small", "model"), Setting("large", "model"), Setting("tree", "topology")]


def test_without_a_name_everything_is_compared_models_first() -> None:
    assert [one.name for one in choose_settings([], SERVED)] == ["small", "large", "tree"]
    assert [one.name for one in choose_settings([], SERVED[1:])] == ["large", "tree"]


def test_a_setting_named_twice_is_compared_once() -> None:
    assert len(choose_settings(["tree", "small", "tree"], SERVED)) == 2


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownModel, match=r"no 'smal'. Did you mean 'small'\?"):
        choose_settings(["smal"], SERVED)


def test_the_baseline_is_the_one_named_or_the_first_topology_or_the_first() -> None:
    settings = choose_settings([], SERVED)
    assert choose_baseline(settings, None).name == "tree"
    assert choose_baseline(settings, "large").name == "large"
    assert choose_baseline(settings[:2], None).name == "small"
    with pytest.raises(ConfigError, match=r"'huge' is not among the settings. They are: small"):
        choose_baseline(settings, "huge")
