"""When a dead engine is started again."""

from shell_router.processes.restarts import RestartPolicy

POLICY = RestartPolicy(limit=3, delay_s=1.0, window_s=100.0)


def test_each_restart_waits_twice_as_long_as_the_one_before() -> None:
    assert [POLICY.next_delay_s([0.0] * times, 1.0) for times in range(3)] == [1.0, 2.0, 4.0]


def test_the_wait_is_never_longer_than_a_minute() -> None:
    assert RestartPolicy(limit=100).next_delay_s([0.0] * 90, 1.0) == 60.0


def test_an_engine_that_keeps_dying_is_left_down() -> None:
    assert POLICY.next_delay_s([0.0, 10.0, 20.0], 30.0) is None


def test_deaths_of_long_ago_are_forgotten() -> None:
    assert POLICY.next_delay_s([0.0, 10.0, 20.0], 105.0) == 4.0


def test_a_limit_of_zero_never_restarts() -> None:
    assert RestartPolicy(limit=0).next_delay_s([], 0.0) is None
