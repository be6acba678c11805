"""Graders: which texts answer what the right answer does."""

import pytest

from shell_router.batch.questions import Grader, choose_grader, is_right, read_answer


@pytest.mark.parametrize(
    ("grader", "text", "answer"),
    [
        ("exact", "Answer: Paris", "paris"),
        ("exact", "  PARIS. ", "Paris"),
        ("exact", "I think so.\nAnswer: New   York", "New York"),
        ("exact", "Answer: A Tale of Two Cities", "A Tale of Two Cities"),
        ("numeric", "Answer: 1,234", "1234"),
        ("numeric", "42", "42"),
        ("numeric", "Answer: 3/4", "0.75"),
        ("numeric", r"\boxed{\frac{3}{4}}", "3/4"),
        ("numeric", r"Answer: \frac{3}{4} cups", "0.75"),
        ("numeric", "#### 1,000", "She has 10 * 100.\n#### 1000"),
        ("numeric", "Answer: 6.02e23", "602e21"),
        ("numeric", "Answer: 3 + 4 = 7", "7"),
        ("numeric", "**The answer is 42.**", "$42.00"),
        ("numeric", "Answer: −42", "-42"),
        ("numeric", "42 apples", "42"),
        ("exact", "Answer: O(n).", "O(n)"),
        ("exact", "Answer: (1, 2)", "(1, 2)"),
        ("choice", "Answer: (C)", "C"),
        ("choice", "Answer: C) 24", "C"),
        ("choice", "B) 24", "B"),
        ("choice", "(B)", "B"),
        ("choice", "Answer: B because it is", "B"),
        ("choice", "Answer: A is right", "A"),
        ("choice", r"\boxed{\text{B}}", "B"),
    ],
)
def test_it_is_right(grader: Grader, text: str, answer: str) -> None:
    assert is_right(text, answer, grader)


@pytest.mark.parametrize(
    ("grader", "text", "answer"),
    [
        ("exact", "Answer: Paris, Texas", "Paris"),
        ("exact", "", "Paris"),
        ("numeric", "Answer: 1234", "123"),
        ("numeric", "24 and 13 is 37", "24"),
        ("numeric", "24 and 13 is 37", "37"),
        ("numeric", "Answer: many", "5"),
        ("numeric", "Answer: 1e999999", "5"),
        ("choice", "Answer: B", "C"),
        ("choice", "A dog barks.", "A"),
        ("choice", "Answer: A dog", "A"),
        ("numeric", "Answer: 3 + 4", "3"),
        ("exact", "Answer: O(n)", "O(n"),
    ],
)
def test_it_is_wrong(grader: Grader, text: str, answer: str) -> None:
    assert not is_right(text, answer, grader)


def test_what_is_no_answer_of_its_kind_reads_as_none() -> None:
    assert read_answer("Answer: many", "numeric") is None
    assert read_answer(" ", "exact") is None
    assert read_answer("who knows", "choice") is None


@pytest.mark.parametrize(
    ("answer", "grader"),
    [
        *((number, "numeric") for number in ("12", "$1,000", "3/4", "x=1 #### 5")),
        *(
            (letter, "choice")
            for letter in ("B", "(D)", "B.", "B) 24", "It is so.\n#### B", r"\boxed{B}")
        ),
        *(
            (words, "exact")
            for words in (
                "Paris",
                "24 pens",
                "A dog",
                "J. K. Rowling",
                "C. elegans",
                "O(n)",
                "(1, 2)",
            )
        ),
    ],
)
def test_the_answers_form_chooses_the_grader(answer: str, grader: Grader) -> None:
    assert choose_grader(answer) == grader
