"""What texts state as their answer."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.early_exit.answers import (
    AnswerReader,
    find_answer,
    find_answer_line,
    normalize_answer,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Tom: 24+13=37. Answer: 37", "37"),
        ("Answer: 37.", "37"),
        ("**Answer:** 42", "42"),
        ("FINAL ANSWER: 7", "7"),
        ("**Answer**: 5/6 of it", "5/6"),
        ("Final answer = (C) because it is so", "C"),
        ("So the answer is $1,234.50.", "1,234.50"),
        ("the answer is (B).", "B"),
        ("The answer is:\n42", "42"),
        ("**The answer is 42.**", "42"),
        (r"so \boxed{12}.", "12"),
        (r"so \boxed{\frac{5}{6}}.", r"\frac{5}{6}"),
        (r"\[ x = \boxed{-5} \]", "-5"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{5 \text{ cm}}", "5"),
        (r"\boxed{1{,}234}", "1,234"),
        ("She has 5.\n#### 5", "5"),
        ("Answer: Paris", "Paris"),
        ("Answer: **Paris.**", "Paris"),
        ("Answer: 5/6", "5/6"),
        ("Final Answer: The final answer is $540$. I hope it is correct.", "540"),
        (r"Answer: \boxed{8}", "8"),
    ],
)
def test_an_answer_is_found_behind_its_mark(text: str, answer: str) -> None:
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("-7 degrees", "-7"),
        ("−42", "-42"),
        ("-$5", "-5"),
        ("$42.00", "42.00"),
        ("42 apples", "42"),
        ("5km", "5"),
        ("12°C", "12"),
        (r"12^\circ", "12"),
        ("42!", "42"),
        ("42, because", "42"),
        ("42 - because", "42"),
        ("50%", "50"),
        ("`42`", "42"),
        ("(42)", "42"),
        (r"\(42\)", "42"),
        (r"\frac{3}{4} cups", r"\frac{3}{4}"),
        ("6.02e23", "6.02e23"),
        ("1,200.", "1,200"),
    ],
)
def test_a_number_ends_where_its_digits_do(said: str, number: str) -> None:
    assert find_answer(f"Answer: {said}") == number


@pytest.mark.parametrize(
    "said",
    [
        "12:30",
        "1, 2, 3",
        "10-12",
        "5x + 3",
        "1,23",
        "3.5.1",
        "10^{5}",
        r"3\sqrt{2}",
        "5 1/2",
        "x = 3, y = 4",
    ],
)
def test_what_begins_with_a_number_and_is_none_is_not_cut_short(said: str) -> None:
    assert find_answer(f"Answer: {said}") == said


@pytest.mark.parametrize(
    "said", ["3 + 4 = 7", "3 + 4 = 7 pens", r"$3 \times 12 - 29 = 7$", "x = 7", "7 = 3 + 4"]
)
def test_an_equations_result_is_its_answer(said: str) -> None:
    assert find_answer(f"Answer: {said}") == "7"


@pytest.mark.parametrize(
    "said",
    ["A", "A.", "A) 24", "A: 24", "A, because", "**A** because", "(A) because", "$A$", "A \n."],
)
def test_a_letter_that_something_ends_is_an_answer(said: str) -> None:
    assert find_answer(f"Answer: {said}") == "A"


@pytest.mark.parametrize(
    "said", ["A dog", "A cat sat", "I am not sure", "I'm not sure", "J. K. Rowling", "A, B", "C++"]
)
def test_a_letter_that_begins_something_longer_is_none(said: str) -> None:
    assert find_answer(f"Answer: {said}") == said


@pytest.mark.parametrize("said", ["O(n)", "(1, 2)", "f(2)", "(a, b]", "Paris (France)"])
def test_brackets_stay_unless_they_are_around_one_letter_or_number(said: str) -> None:
    assert find_answer(f"Answer: {said}") == said
    assert find_answer(rf"\boxed{{{said}}}") == said


def test_a_name_that_ends_its_sentence_is_an_answer() -> None:
    assert find_answer("So the answer is New York. It is large.") == "New York"
    assert find_answer_line("So the answer is New York. It is large.") == "New York"


@pytest.mark.parametrize(
    "text",
    [
        "the answer is to multiply",
        "The answer is not easy.",
        "the answer is Paris because",
        "the answer is Mr. Smith",
    ],
)
def test_what_the_answer_is_said_to_be_in_other_words_is_not_read(text: str) -> None:
    assert find_answer(text) is None


def test_the_last_answer_counts() -> None:
    assert find_answer("Answer: 3. No, wait.\nAnswer: 4") == "4"
    assert find_answer("Answer: 3. No, the answer is 4.") == "4"


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 42.\n\n**Answer:** \n",
        "Answer: 42 Answer: ",
        "42? Answer: 42\n####",
        r"Answer: 42 \boxed{}",
    ],
)
def test_an_empty_statement_hides_nothing(text: str) -> None:
    assert find_answer(text) == "42"


def test_an_answer_may_stand_on_the_line_below_its_mark() -> None:
    assert find_answer("**Answer:**\n42") == "42"
    assert find_answer_line("**Answer:**\nA red hat.\nSo it is.") == "A red hat"
    assert find_answer("Answer:\n\n42") is None


@pytest.mark.parametrize(
    "text", ["", "42", "There is no answer yet.", "the answer is not easy", "Answer:", "Answer: **"]
)
def test_a_text_without_a_mark_states_nothing(text: str) -> None:
    assert find_answer(text) is None


def test_words_are_stated_to_the_end_of_their_line() -> None:
    text = "Answer: 12 Monkeys.\nIt is by Gilliam."
    assert (find_answer(text), find_answer_line(text)) == ("12", "12 Monkeys")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 37", None),
        ("Answer: 37 pens", None),
        ("Answer: 37 pens\n", "37"),
        ("Answer:\n", None),
        ("Answer:\n37", None),
        ("Answer:\n37\n", "37"),
        ("Answer: Paris\n", "Paris"),
        ("the answer is Paris.", None),
        (r"\boxed{37}", None),
        ("\\boxed{37}\n", "37"),
        ("\\boxed{37\n", None),
        ("\\boxed{37\n}\n", "37"),
        ("Answer: 3\nAnswer: 4", "3"),
    ],
)
def test_an_answer_counts_once_its_line_has_ended(text: str, answer: str | None) -> None:
    stated = read(text).stated
    assert (None if stated is None else stated.value) == answer


def read(text: str) -> AnswerReader:
    reader = AnswerReader()
    reader.add(text)
    return reader


MARKS = [
    "Answer: ",
    "answer is ",
    "the answer is: ",
    "ANSWER =",
    "#### ",
    "\\boxed{",
    "\\frac{1}",
    "\\text{",
    "\\circ",
]
WORDS = [
    "**",
    "\\(",
    "\n\n",
    "\r\n",
    "  ",
    "J.",
    "23",
    "456",
    ",000",
    ".5",
    "Paris",
    "New",
    "km",
    "word ",
    "St",
]
BITS = st.sampled_from([*MARKS, *WORDS, *"{}$()^\n .,:=+-/*\\exkBAI1π!°#"])


@given(st.lists(BITS, max_size=40).map("".join), st.data())
def test_how_a_text_is_cut_into_pieces_changes_nothing(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for parts in (pieces, text):
        reader = AnswerReader()
        for part in parts:
            reader.add(part)
        assert (reader.stated, reader.end()) == (read(text).stated, read(text).end())


@given(st.lists(BITS, max_size=40))
def test_what_is_stated_stays_unless_something_else_is_stated(bits: list[str]) -> None:
    reader = AnswerReader()
    for bit in bits:
        reader.add(bit)
    assert reader.stated is None or reader.end() is not None


@pytest.mark.parametrize(
    "piece", ["word ", " 12", "Answer: ", "Answer: 3 ", r"\boxed{", "{", "**", "####", "answer is "]
)
def test_reading_takes_time_linear_in_the_text_on_one_line_too(piece: str) -> None:
    def cpu_s(pieces: int) -> float:
        reader, begin = AnswerReader(), time.process_time()
        reader.add("Answer: yes ")
        for _ in range(pieces):
            reader.add(piece)
        reader.end()
        return time.process_time() - begin

    # 8 times as long where it is linear, 64 times where it is quadratic; a busy machine may need
    # more than one try
    assert any(cpu_s(16000) < 24 * cpu_s(2000) for _ in range(20))


@pytest.mark.parametrize(
    "same",
    [
        ("1,200", "1200", "$1200", "1200.0", "1200.", "1.2e3", r"\$1,200", "**1200**"),
        ("(C)", "c", "C", "C)", "C."),
        ("3/4", "0.75", r"\frac{3}{4}", ".75"),
        ("-42", "−42"),
        ("Paris", "PARIS", "paris."),
        ("(1, 2)", "(1,2)"),
        ("New  York", "new york"),
    ],
)
def test_equal_answers_have_one_comparable_form(same: tuple[str, ...]) -> None:
    assert len({normalize_answer(one) for one in same}) == 1


def test_different_answers_have_different_comparable_forms() -> None:
    different = ("1", "1.5", "12", "(1, 2)", "a", "b", "paris", "1/0", "", "o(n)", "42 pens")
    assert len({normalize_answer(one) for one in different}) == len(different)
