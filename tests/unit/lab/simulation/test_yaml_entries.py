from pathlib import Path

import pytest
import yaml

from shell_router.errors import ConfigError
from shell_router.lab.simulation.yaml_entries import entry_line, entry_text, with_entries

FILE = Path("some.yaml")
BY_HAND = """# mine
first: {a: 1}
experts:
  a: {usage: 0.1}  # mine
  # about b
  b:
    usage: 0.2

last: 3
"""


def test_several_entries_are_put_in_their_places_at_once_and_all_else_stays() -> None:
    text = with_entries(BY_HAND, "experts", {"c": entry_line("c", {"usage": 1}), "b": entry_line("b", 2)}, FILE)
    assert text == BY_HAND.replace("  b:\n    usage: 0.2\n", "  b: 2\n  c: {usage: 1}\n")


def test_a_section_that_is_missing_or_empty_is_begun() -> None:
    for before in ("first: {a: 1}\n", "first: {a: 1}", "first: {a: 1}\ncosts:\n", "costs:\nfirst: {a: 1}\n"):
        text = with_entries(before, "costs", {"gpu": entry_text("gpu", {"k": 1.5}, ["a comment"])}, FILE)
        assert yaml.safe_load(text) == {"first": {"a": 1}, "costs": {"gpu": {"k": 1.5}}}
        assert "    # a comment\n" in text


def test_a_comment_under_a_plain_value_goes_with_it() -> None:
    once = with_entries("a: 1\n", "shares", {"gpu": entry_text("gpu", 0.5, ["found so"])}, FILE)
    again = with_entries(once, "shares", {"gpu": entry_text("gpu", 0.6, ["found anew"])}, FILE)
    assert again == once.replace("0.5", "0.6").replace("found so", "found anew")


@pytest.mark.parametrize("section", ["experts: {a: 1}\n", "experts: ~\n", "experts: [a]\n"])
def test_entries_in_one_line_are_not_torn_apart(section: str) -> None:
    with pytest.raises(ConfigError, match="lines of their own"):
        with_entries(section, "experts", {"b": entry_line("b", 1)}, FILE)
