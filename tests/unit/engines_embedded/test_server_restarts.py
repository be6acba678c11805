"""Dead servers of a fleet, in time that is stepped: started again after a while, killed when hung, left down."""

import logging

import pytest

from shell_router.engines.embedded.server_restarts import ServerRestarts
from shell_router.engines.restarts import RestartPolicy
from tests.fakes.stepped_timers import SteppedTimers

NAMES = ("a/prefill", "a/decode")
START_LIMIT_S = 60.0
ENDED = "Embedded engine a/decode (pid 7) was ended by SIGKILL."


class Fleet:
    """Restarts of two servers, and what was asked for."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.time = SteppedTimers()
        self.started: list[str] = []
        self.killed: list[str] = []
        self.restarts = ServerRestarts(
            NAMES,
            policy,
            start=self.started.append,
            kill=self.killed.append,
            start_limit_s=START_LIMIT_S,
            clock=self.time.clock,
            later=self.time.later,
        )

    def die_and_come_back(self) -> float:
        """Decode ends and serves again; gives the seconds between its end and its start."""
        self.restarts.ended("a/decode", ENDED)
        (delay_s,) = self.time.delays_s
        self.time.step(delay_s)
        self.restarts.ready("a/decode")
        return delay_s


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(RestartPolicy())


def test_a_dead_server_is_started_again_after_its_delay_and_not_before(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.restarts.ended("a/decode", ENDED)
    fleet.time.step(0.999)
    assert fleet.started == []
    assert fleet.restarts.counts == {"a/prefill": 0, "a/decode": 0}
    fleet.time.step(0.001)
    assert fleet.started == ["a/decode"]
    assert fleet.restarts.counts == {"a/prefill": 0, "a/decode": 1}
    (told,) = caplog.records
    assert (told.levelname, told.getMessage()) == (
        "WARNING",
        f"{ENDED} It is started again in 1 s; until it is ready, requests that need it fail.",
    )


def test_a_server_that_keeps_dying_is_left_down_after_five_restarts_and_an_error_says_what_to_do(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    assert [fleet.die_and_come_back() for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 16.0]
    fleet.restarts.ended("a/decode", ENDED)
    assert fleet.time.delays_s == []
    assert fleet.started == ["a/decode"] * 5
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert told.startswith(f"{ENDED} It ended too often and is left down; requests that need it fail.")
    assert told.endswith("then restart the router.")


def test_ten_minutes_later_a_server_has_all_its_restarts_again(fleet: Fleet) -> None:
    for _ in range(5):
        fleet.die_and_come_back()
    fleet.time.step(600.0)
    assert fleet.die_and_come_back() == 1.0
    assert fleet.restarts.counts["a/decode"] == 6


def test_one_server_left_down_does_not_count_against_the_others() -> None:
    fleet = Fleet(RestartPolicy(limit=1))
    fleet.die_and_come_back()
    fleet.restarts.ended("a/decode", ENDED)
    fleet.restarts.ended("a/prefill", "Embedded engine a/prefill ended.")
    fleet.time.step(1.0)
    assert fleet.started == ["a/decode", "a/prefill"]


def test_a_restarted_server_that_is_not_ready_in_time_is_killed_and_started_anew(fleet: Fleet) -> None:
    fleet.restarts.ended("a/decode", ENDED)
    fleet.time.step(1.0)
    fleet.time.step(START_LIMIT_S - 1.0)
    assert fleet.killed == []
    fleet.time.step(1.0)
    assert fleet.killed == ["a/decode"]
    fleet.restarts.ended("a/decode", ENDED)
    assert fleet.time.delays_s == [2.0]


def test_a_restarted_server_that_ends_before_it_is_ready_waits_longer_and_is_not_killed_by_the_limit_of_before(
    fleet: Fleet,
) -> None:
    fleet.restarts.ended("a/decode", ENDED)
    fleet.time.step(1.0)
    fleet.restarts.ended("a/decode", ENDED)
    assert fleet.time.delays_s == [2.0]


def test_a_restarted_server_that_is_ready_in_time_is_left_alone(fleet: Fleet) -> None:
    fleet.die_and_come_back()
    fleet.time.step(START_LIMIT_S)
    assert fleet.killed == []


def test_after_the_stop_nothing_is_started_killed_or_said(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.restarts.ended("a/decode", ENDED)
    caplog.clear()
    fleet.restarts.stop()
    fleet.restarts.ended("a/prefill", "Embedded engine a/prefill ended.")
    fleet.time.step(1000.0)
    assert (fleet.started, fleet.killed, caplog.records) == ([], [], [])
