import json
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from training.problems import LARGEST, TOPICS, Topic, drill, make_problem, problems
from training.questions import as_line, read_problems

from shell_router.early_exit.answers import find_answer

EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
MANY = list(islice(problems(random.Random(1)), 3000))


def holds(equation: tuple[str, ...]) -> bool:
    left, sign, right, result = equation
    a, b, c = int(left), int(right), int(result)
    return {"+": a + b == c, "-": a - b == c and c > 0, "*": a * b == c, "/": a == b * c}[sign]


def in_range(number: int, text: str) -> bool:
    low, high = re.findall(r"\d+|$", text)[:2]
    if "below" in text:
        return number < int(low)
    return int(low) <= number and ("or more" in text or number <= int(high))


def test_every_equation_of_every_solution_holds() -> None:
    for problem in MANY:
        assert all(holds(one) for one in EQUATION.findall(problem.solution)), problem


def test_a_solution_has_one_equation_per_step_and_each_uses_what_was_given_or_worked_out_before() -> (
    None
):
    for problem in MANY:
        numbers = set(re.findall(r"\d+", problem.question))
        equations = EQUATION.findall(problem.solution)
        assert len(equations) == problem.steps
        for left, _, right, result in equations:
            assert {left, right} <= numbers, problem
            numbers.add(result)


def test_the_answer_is_what_the_solution_ends_with() -> None:
    assert all(find_answer(problem.solution) == problem.answer for problem in MANY)


def test_a_number_is_the_last_equations_result_and_a_letter_stands_for_the_one_range_that_holds_it() -> (
    None
):
    for problem in MANY:
        result = EQUATION.findall(problem.solution)[-1][3]
        if problem.kind == "number":
            assert problem.answer == result
        else:
            offered = re.findall(r"([A-D])\) ([\w ]+?)(?= [A-D]\)|$)", problem.question)
            assert [letter for letter, text in offered] == list("ABCD")
            assert [letter for letter, text in offered if in_range(int(result), text)] == [
                problem.answer
            ]


@pytest.mark.parametrize(
    ("topic", "signs"), [("changes", "+-"), ("comparisons", "+-"), ("groups", "*/+")]
)
def test_all_steps_of_a_problem_are_of_its_topic(topic: Topic, signs: str) -> None:
    found = list(islice(problems(random.Random(2), topics=[topic]), 500))
    assert {one.topic for one in found} == {topic}
    assert {one.steps for one in found} == {1, 2, 3, 4}
    equations = [equation for one in found for equation in EQUATION.findall(one.solution)]
    assert all(map(holds, equations))
    assert {sign for _, sign, *_ in equations} == set(signs)
    compared = [
        "fewer" in one.question or re.search(r"more \w+ than", one.question) for one in found
    ]
    assert all(compared) if topic == "comparisons" else not any(compared)


def test_topics_come_up_equally_often_and_a_mixed_story_has_none() -> None:
    topics = Counter(one.topic for one in islice(problems(random.Random(3), topics=TOPICS), 3000))
    assert set(topics) == set(TOPICS)
    assert all(0.3 < number / 3000 < 0.37 for number in topics.values())
    assert {one.topic for one in MANY} == {None}


def test_a_line_says_a_problems_topic_as_a_label(tmp_path: Path) -> None:
    asked = [make_problem(random.Random(4), 2, "number", topic) for topic in (None, "groups")]
    lines = [json.loads(as_line(one)) for one in asked]
    assert [line.get("metadata") for line in lines] == [None, {"topic": "groups"}]
    (tmp_path / "asked.jsonl").write_text("".join(map(as_line, asked)), encoding="utf-8")
    assert read_problems(tmp_path / "asked.jsonl") == asked


def test_no_letter_is_right_much_more_often_than_another() -> None:
    letters = Counter(one.answer for one in MANY if one.kind == "choice")
    assert all(0.2 < number / letters.total() < 0.3 for number in letters.values())


def test_all_difficulties_and_kinds_come_up_and_no_number_grows_without_bound() -> None:
    assert {(one.steps, one.kind) for one in MANY} == {
        (n, kind) for n in range(1, 5) for kind in ("number", "choice")
    }
    assert (
        max(int(result) for one in MANY for *_, result in EQUATION.findall(one.solution))
        <= 2 * LARGEST
    )


def test_equal_seeds_tell_equal_stories() -> None:
    assert make_problem(random.Random(5), 3, "choice") == make_problem(
        random.Random(5), 3, "choice"
    )
    assert make_problem(random.Random(5), 3, "number") != make_problem(
        random.Random(6), 3, "number"
    )


def test_drills_of_a_topic_have_its_signs() -> None:
    _, said = drill(random.Random(1), 200, "groups")
    assert {sign for _, sign, *_ in EQUATION.findall(said)} == set("+*/")


@pytest.mark.parametrize("seed", range(20))
def test_drills_hold_too(seed: int) -> None:
    asked, said = drill(random.Random(seed), 8)
    equations = EQUATION.findall(said)
    assert asked.split() == [f"{left}{sign}{right}" for left, sign, right, _ in equations]
    assert len(equations) == 8
    assert all(map(holds, equations))
