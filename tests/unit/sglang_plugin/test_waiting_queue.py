"""The order of SGLang's waiting queue, without SGLang; tests/sglang has it inside the real one."""

import logging
from dataclasses import dataclass, field, replace

import pytest

from shell_router.sglang_plugin.patches import FAKE_BOOTSTRAP_HOST, PREFILL_ONLY_PORT
from shell_router.sglang_plugin.waiting_queue import TURNS, VARIABLE, make_reorder, read_age_s


@dataclass
class TimeStats:
    wait_queue_entry_time: float


@dataclass
class Request:
    """What is read of SGLang's `Req`."""

    name: str
    tokens: int
    arrived_s: float
    num_matched_prefix_tokens: int = 0
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    origin_input_ids: list[int] = field(init=False)
    time_stats: TimeStats = field(init=False)

    def __post_init__(self) -> None:
        self.origin_input_ids = [1] * self.tokens
        self.time_stats = TimeStats(self.arrived_s)


@dataclass
class Policy:
    enable_priority_scheduling: bool = False


def ordered(
    *requests: Request,
    now_s: float,
    policy: Policy | None = None,
    ranks: int = 1,
    age_s: float | None = 5.0,
) -> list[str]:
    queue = list(requests)
    make_reorder(age_s, clock=lambda: now_s, ranks=lambda: ranks)(
        None, policy or Policy(), queue, None
    )
    return [request.name for request in queue]


LONG, SHORT = Request("long", 900, 0.0), Request("short", 30, 4.0)


def test_the_shortest_prefill_goes_first() -> None:
    assert ordered(LONG, SHORT, now_s=4.5) == ["short", "long"]


def test_who_has_waited_long_goes_before_all_in_order_of_arrival() -> None:
    older = Request("older", 950, -1.0)
    assert ordered(SHORT, LONG, older, now_s=5.0) == ["older", "long", "short"]


def test_what_is_cached_already_does_not_count() -> None:
    mostly_cached = Request("cached", 900, 1.0, num_matched_prefix_tokens=890)
    assert ordered(SHORT, mostly_cached, now_s=4.5) == ["cached", "short"]


UPDATE = Request(
    "update", 5, 1.0, bootstrap_host=FAKE_BOOTSTRAP_HOST, bootstrap_port=PREFILL_ONLY_PORT
)


@pytest.mark.parametrize("now_s", [4.5, 60.0])
def test_an_update_waits_behind_all_other_requests(now_s: float) -> None:
    assert ordered(replace(UPDATE), SHORT, now_s=now_s) == ["short", "update"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_yield_without_aging_and_on_several_ranks_and_others_keep_their_order(
    ranks: int,
) -> None:
    assert ordered(replace(UPDATE), LONG, SHORT, now_s=60.0, age_s=None, ranks=ranks) == [
        "long",
        "short",
        "update",
    ]


@pytest.mark.parametrize(("age_s", "ranks"), [(5.0, 1), (None, 1), (None, 2)])
def test_an_update_yields_no_more_than_so_often(age_s: float | None, ranks: int) -> None:
    update, reorder = replace(UPDATE), make_reorder(age_s, clock=lambda: 60.0, ranks=lambda: ranks)
    first = []
    for number in range(TURNS + 1):
        queue = [update, Request(f"new {number}", 30, 59.0)]
        reorder(None, Policy(), queue)
        first.append(queue[0] is update)
    assert first == [False] * TURNS + [True]


def test_a_server_that_schedules_by_priority_is_left_alone() -> None:
    assert ordered(LONG, SHORT, now_s=4.5, policy=Policy(enable_priority_scheduling=True)) == [
        "long",
        "short",
    ]


def test_a_server_of_several_ranks_keeps_its_order_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        assert ordered(LONG, SHORT, now_s=4.5, ranks=2) == ["long", "short"]
    assert "servers of one rank" in caplog.text


@pytest.mark.parametrize(
    ("given", "age_s"), [({}, None), ({VARIABLE: "5"}, 5.0), ({VARIABLE: "0.5"}, 0.5)]
)
def test_the_environment_says_after_how_long(given: dict[str, str], age_s: float | None) -> None:
    assert read_age_s(given) == age_s


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan"])
def test_what_is_no_time_is_refused_and_changes_nothing(
    given: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert read_age_s({VARIABLE: given}) is None
    assert VARIABLE in caplog.text
