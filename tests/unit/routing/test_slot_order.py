from shell_router.routing.increments import order_slots

AGENTS = ("large", "small", "new", "medium")
EXPECTED_S = {"large": 9.0, "small": 1.0, "medium": 3.0}


def test_declared_order_ignores_expectations() -> None:
    assert order_slots(AGENTS, "declared", EXPECTED_S) == AGENTS


def test_expected_finish_puts_the_quickest_first_and_the_unknown_last() -> None:
    assert order_slots(AGENTS, "expected_finish", EXPECTED_S) == ("small", "medium", "large", "new")


def test_equals_keep_their_declared_order() -> None:
    assert order_slots(AGENTS, "expected_finish", {}) == AGENTS
