import pytest

from benchmarks.coserve.pool.usage import ChainRule, rules_of, usage_of
from shell_router.errors import ConfigError

pytestmark = pytest.mark.slow


RULES = [
    ChainRule(("type-1", "detector"), 3.0),
    ChainRule(("type-2", "detector"), 1.0),
    ChainRule(("type-3",), 1.0),
]


def test_an_expert_is_needed_as_often_as_the_chains_that_name_it() -> None:
    usage = usage_of(RULES)
    assert {name: one.probability for name, one in usage.items()} == pytest.approx(
        {"type-1": 0.6, "type-2": 0.2, "type-3": 0.2, "detector": 0.8}
    )


def test_an_expert_follows_on_those_that_stand_right_before_it() -> None:
    usage = usage_of([*RULES, ChainRule(("type-1", "detector", "reader"), 1.0)])
    assert usage["detector"].after == {"type-1", "type-2"}
    assert usage["reader"].after == {"detector"}
    assert usage["type-1"].after == frozenset()


def test_one_that_some_requests_begin_with_needs_no_predecessor() -> None:
    assert usage_of([*RULES, ChainRule(("detector",), 0.1)])["detector"].after == frozenset()


def test_a_sample_is_as_good_as_the_rules_it_was_drawn_by() -> None:
    chains = [rule.chain for rule in RULES for _ in range(int(rule.share))]
    assert usage_of(rules_of(chains)) == usage_of(RULES)


@pytest.mark.parametrize("chain", [(), ("a", "a")])
def test_rules_that_no_request_could_follow_are_refused(chain: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        ChainRule(chain, 1.0)
