"""Typed values of files: all problems at once, bounded, with places and remedies."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Interval

from shell_router.errors import ConfigError, InvalidField, hide_user, require
from shell_router.files.read import MAX_PROBLEMS, check, read_file, read_sent
from shell_router.files.types import CODE_ONLY, DISTINCT, SECRET, Count, FilePath, Name, Switch


@dataclass(frozen=True, slots=True)
class Door:
    """A door."""

    key: Annotated[str, "Its key.", SECRET] = field(default="", repr=False)
    width: Annotated[float, Interval(gt=0, le=3), "Meters."] = 1.0


@dataclass(frozen=True, slots=True)
class House:
    """A house."""

    doors: Annotated[Mapping[Name, Door | str], "By name."]
    floors: Annotated[Count | Literal["many"], "Floors."] = 1
    plan: Annotated[FilePath | None, "The plan."] = None
    lit: Annotated[Switch, "Whether it is lit."] = False
    colors: Annotated[tuple[str, ...], DISTINCT, "Colors."] = ()
    strength: Annotated[int, CODE_ONLY] = 3

    def __post_init__(self) -> None:
        require(self.floors != 13, "floors are 13", "Build another.")


def test_a_file_becomes_a_dataclass_with_paths_from_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "house.yaml"
    file.write_text("doors:\n  front: {width: 2}\n  back: open\nplan: p.txt\nlit: 'on'\n")
    house, locate = read_file(file, House)
    assert house == House(
        {"front": Door(width=2.0), "back": "open"}, plan=tmp_path / "p.txt", lit=True
    )
    assert locate(("doors", "back")) == f"{file}:3"


WRONG = {
    "missing": ({}, "The file lacks 'doors'."),
    "unknown": ({"doors": {}, "florrs": 1}, "Unknown key 'florrs'. Did you mean 'floors'?"),
    "code only": ({"doors": {}, "strength": 1}, "Unknown key 'strength'."),
    "a union": (
        {"doors": {}, "floors": 0},
        "floors must be a whole number at least 1 or 'many', not 0.",
    ),
    "inside of a union": (
        {"doors": {"front": {"width": 9}}},
        "doors.front.width must be a number above 0 and at most 3, not 9.",
    ),
    "a key": (
        {"doors": {"a b": "open"}},
        "doors.a b must be a name of letters a to z, digits, '.', '_' and '-', not 'a b'.",
    ),
    "a number as text": ({"doors": {}, "floors": "1e1"}, "not '1e1'. Write 10."),
    "text as a number": ({"doors": {}, "plan": 3}, "plan must be a path, not 3. Put it in quotes."),
    "a secret": ({"doors": {"front": {"key": 123}}}, "doors.front.key must be text, not a number."),
    "truth as a number": ({"doors": {}, "floors": True}, "not true."),
    "twice": ({"doors": {}, "colors": ["red", "red"]}, "colors: it names 'red' twice."),
    "refused by the class": ({"doors": {}, "floors": 13}, "floors are 13. Build another."),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_problem_says_what_the_place_may_hold(case: str) -> None:
    value, words = WRONG[case]
    _, (problem,) = check(House, value)
    assert words in f"{problem.message} {problem.remedy}"


def test_all_problems_are_named_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "house.yaml"
    file.write_text("floors: 0\nlit: maybe\ndoors: {front: {widht: 1}}\n")
    with pytest.raises(ConfigError) as error:
        read_file(file, House)
    places = [line.split(" ")[0] for line in str(error.value).splitlines()]
    assert places == [f"{file}:1:", f"{file}:2:", f"{file}:3:"]


def test_a_clients_value_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidField) as error:
        read_sent(House, {"doors": {"front": {"width": 0}}}, "house")
    assert error.value.field == "house.doors.front.width"


def test_problems_of_one_document_are_bounded() -> None:
    _, problems = check(House, {"doors": {f"d{n}": 1 for n in range(5000)}})
    assert len(problems) == MAX_PROBLEMS


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no http://a:b/c@d:1/x and //e@f", "no http://d:1/x and //f"),
        ("http://a//b:c@d", "http://d"),
        ("a@b.example http://d", "a@b.example http://d"),
    ],
)
def test_users_and_passwords_of_urls_are_hidden(text: str, shown: str) -> None:
    assert hide_user(text) == shown


def test_the_work_to_hide_them_grows_with_the_text_alone() -> None:
    begun_s = time.process_time()
    hide_user("//" * 40_000)
    assert time.process_time() - begun_s < 1  # 19 s if each // is the beginning of a URL
