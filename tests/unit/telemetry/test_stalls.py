"""How long the event loop was held up is measured, and a long stall is in the log."""

import pytest

from shell_router.telemetry.metrics import LONG_STALL_S, STALL_CHECK_S, StallWatch


def test_the_longest_stall_is_remembered_for_a_minute_or_two(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch(100.0)
    assert watch.tick(100.0 + STALL_CHECK_S) == STALL_CHECK_S
    assert watch.longest_s == pytest.approx(0.0)
    watch.tick(100.0 + 2 * STALL_CHECK_S + LONG_STALL_S + 0.2)
    assert watch.longest_s == pytest.approx(LONG_STALL_S + 0.2)
    assert "held up for 300 ms" in caplog.text
    now_s = 100.0 + 2 * STALL_CHECK_S + LONG_STALL_S + 0.2
    for minute in range(3):
        assert watch.longest_s > 0.1 or minute == 2
        for _ in range(1201):
            now_s += STALL_CHECK_S
            watch.tick(now_s)
    assert watch.longest_s == pytest.approx(0.0)
