import pytest

from shell_router.early_exit.answers import Ballot, cast_ballot, elect


def votes(*answers: str | None, confidence: float = 0.5) -> list[Ballot]:
    return [Ballot(f"a{n}", answer, confidence) for n, answer in enumerate(answers)]


def source(ballots: list[Ballot], waiting: int = 0) -> str | None:
    found = elect(ballots, waiting)
    return None if found is None else found.agent


@pytest.mark.parametrize(
    ("answers", "waiting", "decided"),
    [
        (("4", "4"), 1, True),
        (("4", "4"), 2, False),  # the two others could both say 5, and be surer of it
        (("4", "5", "4"), 1, False),
        (("4", "5", "4", "4"), 1, True),
        (("4",) * 5, 4, True),
        (("4", None), 1, False),
        ((), 1, False),
    ],
)
def test_a_vote_is_decided_once_no_other_answer_can_come_as_far(
    answers: tuple[str | None, ...], waiting: int, decided: bool
) -> None:
    assert (elect(votes(*answers), waiting) is not None) is decided


def test_the_most_confident_output_with_the_winning_answer_is_forwarded() -> None:
    assert source([Ballot("a", "4", 0.5), Ballot("b", "4", 0.7), Ballot("c", "5", 0.9)]) == "b"


def test_of_answers_with_equally_many_votes_the_one_with_more_confidence_wins() -> None:
    tied = [
        Ballot("a", "4", 0.9),
        Ballot("b", "5", 0.7),
        Ballot("c", "4", 0.1),
        Ballot("d", "5", 0.6),
    ]
    assert source(tied) == "b"


def test_of_what_is_equal_in_all_the_first_is_forwarded() -> None:
    assert source(votes("4", "5", "6")) == "a0"


def test_without_any_vote_the_most_confident_output_is_forwarded() -> None:
    assert source([Ballot("a", None, 0.5), Ballot("b", None, 0.7)]) == "b"
    assert elect([], 0) is None


def test_an_output_votes_for_its_stated_answer_or_else_for_its_whole_text() -> None:
    said = ["So it is 1,200. Answer: 1200", "**Answer:** $1,200.0", "Positive.", "positive"]
    read = [cast_ballot("a", text, 0.5, is_cut=False).answer for text in said]
    assert read[0] == read[1] != read[2] == read[3]


@pytest.mark.parametrize(("text", "is_cut"), [("Answer: 4", True), (" ", False)])
def test_an_output_that_is_empty_or_was_cut_at_its_limit_has_no_vote(
    text: str, is_cut: bool
) -> None:
    assert cast_ballot("a", text, 0.5, is_cut=is_cut).answer is None


def test_a_vote_by_confidence_lets_one_sure_output_outvote_two_unsure_ones() -> None:
    ballots = [Ballot("a", "4", 0.4), Ballot("b", "5", 0.9), Ballot("c", "4", 0.3)]
    by_confidence = elect(ballots, 0, by_confidence=True)
    assert (by_confidence, source(ballots)) == (ballots[1], "a")


@pytest.mark.parametrize(("confidence", "decided"), [(0.6, True), (0.4, False)])
def test_a_vote_by_confidence_is_decided_once_no_sure_output_can_change_it(
    confidence: float, decided: bool
) -> None:
    ballots = votes("4", "4", confidence=confidence)
    assert (elect(ballots, 1, by_confidence=True) is not None) is decided


def test_an_output_with_an_answer_beats_one_without_however_unsure_it_is() -> None:
    ballots = [Ballot("a", None, 0.9), Ballot("b", "4", 0.0)]
    assert elect(ballots, 0, by_confidence=True) is ballots[1]
