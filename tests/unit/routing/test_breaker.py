"""The circuit breaker, stepped by hand."""

from shell_router.routing.failures import Breaker, BreakerSettings

SETTINGS = BreakerSettings(failures=3, open_s=5.0)


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    assert [breaker.note_failure(at_s) for _ in range(3)] == [False, False, True]
    return breaker


def test_it_opens_at_that_number_of_failures_in_a_row() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(2):
        breaker.note_failure(0.0)
    breaker.note_success()
    for _ in range(2):
        breaker.note_failure(0.0)
    assert (breaker.open, breaker.wait_s(0.0)) == (False, 0.0)
    assert breaker.note_failure(0.0)
    assert (breaker.open, breaker.wait_s(0.0)) == (True, 5.0)


def test_an_open_breaker_lets_one_request_through_per_interval() -> None:
    breaker = opened(at_s=10.0)
    assert breaker.wait_s(14.0) == 1.0
    assert breaker.wait_s(15.0) == 0.0
    breaker.note_attempt(15.0)
    assert breaker.wait_s(15.0) == 5.0, "a second request went with the first"
    assert breaker.wait_s(20.0) == 0.0, (
        "a trial that never came back keeps the server away for ever"
    )


def test_one_success_closes_it() -> None:
    breaker = opened()
    assert breaker.note_success()
    assert (breaker.open, breaker.wait_s(0.0)) == (False, 0.0)
    assert not breaker.note_success(), "closing is reported once"


def test_late_failures_of_requests_under_way_do_not_prolong_it() -> None:
    breaker = opened(at_s=0.0)
    assert not breaker.note_failure(4.0)
    assert breaker.wait_s(5.0) == 0.0
