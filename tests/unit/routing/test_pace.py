"""The room for batches, from measured paces."""

import pytest

from shell_router.routing.pace import Pace


def measured(*samples: tuple[int, float]) -> Pace:
    pace = Pace()
    for running, token_s in samples * 5:
        pace.note(running, token_s)
    return pace


@pytest.mark.parametrize(
    ("samples", "online", "room"),
    [
        ((), 3, 1),
        (((4, 1.0), (5, 1.0)), 3, 1),  # one load says nothing of another
        (((1, 1.01), (64, 1.64)), 1, 5),  # 5 % of 1.01 s, at 0.01 s each
        (((1, 1.01), (64, 1.64)), 64, 8),
        (((1, 1.0), (2, 2.0)), 1, 0),  # each slows the other by half
        (((1, 1.0), (8, 1.0)), 2, 14),  # no cost was seen up to 8
        (((1, 1.0), (8, 0.9)), 20, 0),
        (((1, 1.0), (8, 1.0001)), 2, 14),
        (((8, 1.0), (16, 1.0)), 2, 1),  # how fast two are alone is not known
    ],
)
def test_batches_get_as_many_places_as_slow_online_requests_little(
    samples: tuple[tuple[int, float], ...], online: int, room: int
) -> None:
    assert measured(*samples).count_room(online, 0.05) == room


def test_outputs_are_measured_by_the_mean_of_those_that_ran_meanwhile() -> None:
    pace = Pace()
    pace.count(1, 0.0)
    for begin_s in range(0, 150, 30):
        begin = pace.mark(begin_s)
        pace.count(9, begin_s + 10)  # for half of the time
        pace.measure(begin, 10, pace.mark(begin_s + 20))  # 5.5 in the mean, and 2 s a token
        pace.count(-9, begin_s + 20)
        alone = pace.mark(begin_s + 20)
        pace.measure(alone, 10, pace.mark(begin_s + 30))
    assert pace.count_room(1, 1.0) == 4  # 1 / ((2 - 1) / 4.5)


def test_the_room_follows_an_engine_whose_pace_changes() -> None:
    pace = measured((1, 1.0), (8, 1.0))
    for _ in range(200):
        pace.note(8, 8.0)
    assert pace.count_room(4, 0.05) == 0
