from random import random

import pytest

from shell_router.early_exit.algorithm1 import Score
from shell_router.early_exit.in_flight import NO_QUORUM, InFlightGate, Overlap
from shell_router.early_exit.settings import POLICIES, EarlyExit
from shell_router.errors import InvalidField
from shell_router.files.read import read_sent

RUNNING = ("a", "b", "c")


def gate(quorum: int = 1) -> InFlightGate:
    return InFlightGate(RUNNING, quorum=quorum, threshold=0.0)


def write(judged: InFlightGate, name: str, text: str, confidence: float = 1.0) -> None:
    for piece in (text[at : at + 3] for at in range(0, len(text), 3)):
        judged.add_text(name, piece, confidence)


def end(judged: InFlightGate, name: str, text: str, confidence: float = 1.0) -> None:
    write(judged, name, text, confidence)
    judged.add_output(name, text, confidence, None)


def test_overlap_grows_with_what_was_said_of_the_other_text() -> None:
    overlap = Overlap(["one", "two", "three", "four"])
    assert overlap.value == 0
    overlap.add(["one", "two"])
    assert overlap.value == 0.5
    overlap.add(["four", "three"])
    assert overlap.value == 1


def test_overlap_falls_with_what_the_other_text_does_not_say() -> None:
    overlap = Overlap(["one", "two"])
    overlap.add(["one", "one", "two", "five"])
    assert overlap.value == 0.5


def test_nothing_is_scored_before_an_output_with_an_answer_has_ended() -> None:
    judged = gate()
    write(judged, "a", "2+2=4. Answer: 4 I am sure")
    assert judged.score(RUNNING) == NO_QUORUM
    judged.add_output("a", "", 1.0, None)
    assert judged.score(("b", "c")) != NO_QUORUM


def test_an_output_without_an_answer_supports_nothing() -> None:
    judged = gate()
    end(judged, "a", "I do not know")
    assert judged.score(("b", "c")) == NO_QUORUM


def test_what_is_half_said_counts_as_far_as_it_agrees() -> None:
    judged = gate()
    end(judged, "a", "Tom: 2+2=4. Mia: 4*2=8. Answer: 8")
    write(judged, "b", "Tom: 2+2=4. Mia: ")
    write(judged, "c", "Tom: 2+2=5. Mia: ")
    scored = judged.score(("b", "c"))
    assert scored == Score(
        confidence=1,
        agreement=pytest.approx((1 + 3 / 6 + 2 / 6) / 3),
        balance=1,
        probability=pytest.approx(11 / 18),
    )


def test_the_support_is_weighted_by_how_sure_each_is() -> None:
    judged = gate()
    end(judged, "a", "Answer: 8", 0.9)
    end(judged, "b", "Answer: 8", 0.6)
    scored = judged.score(("c",))
    assert scored.probability == pytest.approx((0.9 + 0.6) / 3)
    assert scored.confidence == pytest.approx(((0.81 + 0.36) / 2) ** 0.5)
    assert scored.agreement == pytest.approx(2 / 3)


def test_who_states_another_answer_does_not_support_however_alike_the_words() -> None:
    judged = gate()
    end(judged, "a", "I add it all up. Answer: 8")
    end(judged, "b", "I add it all up. Answer: 9", 0.5)
    write(judged, "c", "I add it all up. Answer: 9\n", 0.4)
    scored = judged.score(("c",))
    assert scored.probability == pytest.approx(1 / 3)


def test_the_answer_with_more_confidence_behind_it_leads() -> None:
    judged = gate(quorum=2)
    end(judged, "a", "Answer: 8", 1.0)
    end(judged, "b", "Answer: 9", 0.7)
    assert judged.score(("c",)) == NO_QUORUM
    write(judged, "c", "Answer: 9, for\n", 0.7)
    scored = judged.score(("c",))
    assert scored.probability == pytest.approx(1.4 / 3)


def test_the_same_number_written_otherwise_is_the_same_answer() -> None:
    judged = gate(quorum=2)
    end(judged, "a", "The answer is 1,200.")
    end(judged, "b", "#### 1200")
    assert judged.score(("c",)) != NO_QUORUM


def test_an_unfinished_answer_is_not_taken_for_the_answer() -> None:
    judged = gate(quorum=2)
    end(judged, "a", "Answer: 12")
    write(judged, "b", "Answer: 12")
    assert judged.score(("b", "c")) == NO_QUORUM
    write(judged, "b", "34")
    write(judged, "c", "Answer: 12\n")
    assert judged.score(("b", "c")) != NO_QUORUM


def test_members_that_are_gone_count_no_more() -> None:
    judged = gate()
    end(judged, "a", "Answer: 12")
    assert judged.score(("b", "c")) == Score(1, pytest.approx(1 / 3), 1, pytest.approx(1 / 3))
    assert judged.score(("b",)) == Score(1, 0.5, 1, 0.5)


def test_one_that_began_late_is_compared_from_its_first_word_on() -> None:
    judged = gate()
    end(judged, "a", "Tom has 4. Answer: 4")
    write(judged, "b", "Tom has 4. ")
    scored = judged.score(("b",))
    assert scored.agreement == pytest.approx((1 + 3 / 5) / 2)


def test_the_policies_that_compare_whole_outputs_need_embeddings() -> None:
    embeds = {name for name in POLICIES if EarlyExit(name).needs.embeds}
    assert embeds == {"paper", "threshold", "monotone"}


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidField, match="'paper' or 'threshold' or 'monotone' or 'in_flight'"):
        read_sent(EarlyExit, {"policy": "early"}, "early_exit")


def test_the_surest_has_ended_and_states_the_leading_answer() -> None:
    judged = gate(quorum=2)
    end(judged, "a", "Answer: 8", 0.7)
    write(judged, "b", "Answer: 8, I know\n", 0.99)
    end(judged, "c", "Answer: 9", 0.8)
    assert judged.judge(("b",), random).sources[0] == "a"
