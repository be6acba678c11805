"""What is compared, and with what."""

import pytest

from shell_router.errors import ConfigError, UnknownModel
from shell_router.lab.evaluation.settings import Served, baseline_of, chosen_settings

SERVED = [Served("small", "model"), Served("large", "model"), Served("tree", "topology")]


def test_without_a_name_everything_is_compared_models_first_then_their_vote() -> None:
    assert [one.name for one in chosen_settings([], SERVED)] == ["small", "large", "vote:small*3,large*3", "tree"]
    assert [one.name for one in chosen_settings([], SERVED[1:])] == ["large", "tree"]


def test_a_vote_asks_each_member_as_often_as_it_says() -> None:
    [vote] = chosen_settings(["vote:small*2, large"], SERVED)
    assert (vote.kind, vote.members) == ("vote", ("small", "small", "large"))


def test_a_setting_named_twice_is_compared_once() -> None:
    assert len(chosen_settings(["tree", "small", "tree"], SERVED)) == 2


@pytest.mark.parametrize("name", ["smal", "vote:smal*2", "vote:small,smal"])
def test_an_unknown_name_is_refused_with_the_nearest_and_all_others(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"no 'smal'. Did you mean 'small'\? It serves: small, large"):
        chosen_settings([name], SERVED)


def test_a_topology_cannot_vote() -> None:
    with pytest.raises(UnknownModel, match="no 'tree'"):
        chosen_settings(["vote:tree,small"], SERVED)


def test_an_empty_vote_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no members"):
        chosen_settings(["vote:"], SERVED)


def test_the_baseline_is_the_one_named_or_the_first_topology_or_the_first() -> None:
    settings = chosen_settings([], SERVED)
    assert baseline_of(settings, None).name == "tree"
    assert baseline_of(settings, "large").name == "large"
    assert baseline_of(settings[:2], None).name == "small"
    with pytest.raises(ConfigError, match=r"'huge' is not among the settings. They are: small"):
        baseline_of(settings, "huge")
