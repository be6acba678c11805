"""When a launched engine is started again."""

from shell_router.engines.restarts import RestartPolicy
from shell_router.launching import EngineRestarts

RESTARTS = EngineRestarts(RestartPolicy(limit=3, delay_s=1.0, window_s=100.0), prefill_away_s=5.0)


def test_a_decode_waits_as_its_policy_says() -> None:
    assert [RESTARTS.next_delay_s("decode", [0.0] * times, 1.0) for times in range(4)] == [1.0, 2.0, 4.0, None]


def test_a_prefill_stays_away_until_its_decode_has_forgotten_it() -> None:
    assert [RESTARTS.next_delay_s("prefill", [0.0] * times, 1.0) for times in range(4)] == [5.0, 5.0, 5.0, None]
    assert EngineRestarts(RestartPolicy(delay_s=8.0)).next_delay_s("prefill", [], 0.0) == 8.0
