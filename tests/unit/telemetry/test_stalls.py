"""How long the event loop was held up is measured, and a long stall is in the log."""

from collections.abc import Callable
from contextlib import closing

import pytest

from shell_router.telemetry import Metrics, StallWatch
from shell_router.telemetry.metrics import LONG_STALL_S, STALL_CHECK_S


class Loop:
    """Has one timer, which `later` lets go off, as late as it says."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now_s

    def call_later(self, wait_s: float, call: Callable[[], None]) -> "Loop":
        self.timer = self.now_s + wait_s, call
        return self

    def cancel(self) -> None:
        self.timer = None

    def later(self, late_s: float = 0.0) -> None:
        assert self.timer is not None
        due_s, call = self.timer
        self.now_s = due_s + late_s
        call()


def test_the_longest_stall_is_remembered_for_a_minute_or_two(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, metrics = Loop(), Metrics()

    def longest_s() -> float | None:
        return metrics.registry.get_sample_value("shell_router_event_loop_longest_stall_seconds")

    with closing(StallWatch(loop, metrics.longest_stall)):  # type: ignore[arg-type]
        loop.later()
        assert longest_s() == pytest.approx(0.0)
        loop.later(LONG_STALL_S + 0.2)
        assert longest_s() == pytest.approx(LONG_STALL_S + 0.2)
        assert "held up for 300 ms" in caplog.text
        for minute in range(3):
            assert (longest_s() or 0) > 0.1 or minute == 2
            for _ in range(round(60 / STALL_CHECK_S) + 1):
                loop.later()
        assert longest_s() == pytest.approx(0.0)
    assert loop.timer is None, "it ticks on"
