"""When a new placement is worth a restart."""

import pytest

from shell_router.experts.placement.records import Measures, judge_gain

NOW = Measures(balance=1.2, worst_balance=1.5, deviation=0.5, traffic=0.6)


def of(balance: float, traffic: float) -> Measures:
    return Measures(balance, balance, 0.1, traffic)


@pytest.mark.parametrize(
    ("new", "worth_it", "reason"),
    [
        (of(1.1, 0.6), True, "balance 1.200 to 1.100, traffic 60.0% to 60.0%"),
        (of(1.2, 0.5), True, "traffic 60.0% to 50.0%"),
        (of(1.0, 0.65), True, "traffic 60.0% to 65.0%"),
        (of(1.17, 0.57), True, "balance 1.200 to 1.170"),
        (of(1.19, 0.59), False, "a gain below 5%"),
        (NOW, False, "a gain below 5%"),
        (of(1.1, 0.7), False, "a gain below 5%"),
        (of(1.5, 0.4), False, "a gain below 5%"),
    ],
)
def test_a_gain_in_balance_and_traffic_together_is_worth_it(
    new: Measures, worth_it: bool, reason: str
) -> None:
    found, why = judge_gain(NOW, new, 0.05)
    assert found is worth_it
    assert reason in why
