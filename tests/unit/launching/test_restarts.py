"""When a launched engine is started again."""

from shell_router.config.models import Role
from shell_router.launching.supervisor import Patience, policy_of
from shell_router.processes.restarts import RestartPolicy


def delays_s(role: Role, policy: RestartPolicy) -> list[float | None]:
    kept = policy_of(role, policy, Patience(prefill_away_s=5.0))
    return [kept.next_delay_s([0.0] * times, 1.0) for times in range(4)]


def test_a_decode_waits_as_its_policy_says() -> None:
    assert delays_s("decode", RestartPolicy(limit=3)) == [1.0, 2.0, 4.0, None]


def test_a_prefill_stays_away_until_its_decode_has_forgotten_it() -> None:
    assert delays_s("prefill", RestartPolicy(limit=3)) == [5.0, 5.0, 5.0, None]
    assert delays_s("prefill", RestartPolicy(delay_s=8.0))[0] == 8.0
