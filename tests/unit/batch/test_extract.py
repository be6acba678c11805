import pytest

from shell_router.batch.pool import Answers
from shell_router.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So 1,200 it is.\nAnswer: $1200.0", "1200"),
        ("#### 12", "12"),
        (r"thus \boxed{\frac{1}{2}}", "1/2"),
        ("Answer: 0.5", "1/2"),
        ("The answer is B. Because", "b"),
        ("Answer: (C)", "c"),
        ("Answer:  New   York ", "new york"),
        ("Answer: 3\nNo, wait.\nAnswer: 4", "4"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_an_answer_stands_behind_a_mark_and_equal_ones_are_equal(
    text: str, answer: str | None
) -> None:
    assert Answers().read(text) == answer


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("numeric", "42 apples", "42"),
        ("choice", "a dog", None),
        ("exact", "  A  dog. ", "a dog"),
    ],
)
def test_a_kind_reads_texts_without_a_mark_too(kind: str, text: str, answer: str | None) -> None:
    assert Answers(kind).read(text) == answer  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"\d+", "1 or 2 or 3", "3"),
        (r"final: (\w+)", "final: x, final: y", "y"),
        (r"(a)-(b)", "a-b", "a"),
        (r"x(\d)?", "x1 x", None),
        (r"\d*", "none", None),
        (r"\d+", "none", None),
        (r"\d+", "", None),
    ],
)
def test_of_a_pattern_the_last_match_counts_or_the_group_in_it(
    pattern: str, text: str, answer: str | None
) -> None:
    assert Answers(pattern=pattern).read(text) == answer


def test_what_is_no_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match="pattern is no regular expression"):
        Answers(pattern="(")
