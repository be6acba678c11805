"""Who wins a vote."""

import pytest

from shell_router.batch.questions import find_plurality


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        (["5", "6", "5"], 2),
        (["6", "5", "5", "6", "5"], 4),
        (["5", "6"], 1),
        (["5", "6", "6", "5"], 3),
        (["5", "5", "6", "6", "7"], 3),
        ([None, "5", None, None], 1),
        ([None, None], None),
        ([], None),
    ],
)
def test_most_votes_win_and_of_several_the_one_named_last(
    votes: list[str | None], winner: int | None
) -> None:
    assert find_plurality(votes) == winner
