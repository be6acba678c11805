"""What is sent again, and when."""

import pytest

from shell_router.errors import (
    EngineAborted,
    EngineRejected,
    EngineStalled,
    EngineUnreachable,
    PromptTooLong,
    ShellRouterError,
)
from shell_router.routing.failures import RetrySettings

SETTINGS = RetrySettings(attempts=3, delay_s=0.1, jitter=0.2)
MIDDLE = 0.5


@pytest.mark.parametrize(
    "error",
    [
        EngineUnreachable("reset"),
        *(EngineRejected("busy", status=status) for status in (408, 429, 500, 502, 503, 504)),
    ],
    ids=str,
)
def test_what_may_pass_is_sent_again_until_the_attempts_are_used_up(
    error: ShellRouterError,
) -> None:
    assert [SETTINGS.wait_s(error, attempt, MIDDLE) for attempt in (1, 2, 3)] == [0.1, 0.2, None]


@pytest.mark.parametrize(
    "error",
    [
        EngineRejected("bad", status=400),
        EngineRejected("no such way", status=501),
        EngineStalled("silent"),
        EngineAborted("not wanted"),
        PromptTooLong("too long"),
    ],
    ids=str,
)
def test_what_will_not_pass_is_not(error: ShellRouterError) -> None:
    assert SETTINGS.wait_s(error, 1, MIDDLE) is None


def test_waits_differ_by_the_jitter() -> None:
    found = [SETTINGS.wait_s(EngineUnreachable("reset"), 1, draw) for draw in (0.0, 0.999)]
    assert found == pytest.approx([0.08, 0.12], rel=1e-2)


def test_one_attempt_is_no_retry() -> None:
    assert RetrySettings(attempts=1).wait_s(EngineUnreachable("reset"), 1, MIDDLE) is None
