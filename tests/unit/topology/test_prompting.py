import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.errors import InvalidField
from shell_router.files.read import read_sent
from shell_router.topology.prompting import AGGREGATOR, Prompt, fill_text, slot_parts


def test_the_question_stands_where_its_placeholder_stood() -> None:
    assert fill_text("Answer: {question}!", "why?") == "Answer: why?!"


def test_doubled_braces_are_braces_meant_as_text() -> None:
    assert fill_text('{{"q": "{question}"}}', "x") == '{"q": "x"}'


@given(st.text())
def test_a_question_is_never_scanned_for_placeholders(question: str) -> None:
    assert fill_text("<{question}|{question}>", question) == f"<{question}|{question}>"


@pytest.mark.parametrize("question", ["{question}", "{output}", "{0.__class__}", "{", "}}", "%s"])
def test_a_question_may_look_like_a_placeholder(question: str) -> None:
    assert fill_text("{question}", question) == question


@pytest.mark.parametrize(
    "template",
    [
        "{output}",
        "{question.__class__}",
        "{question[0]}",
        "{question!r}",
        "{question:>9}",
        "{}",
        "{",
        "}",
    ],
)
def test_anything_but_the_bare_placeholder_is_refused(template: str) -> None:
    with pytest.raises(InvalidField, match=r"^prompt\.prefix: "):
        read_sent(Prompt, {"prefix": template}, "prompt")


def test_a_slot_is_parted_around_its_output() -> None:
    assert slot_parts("\n[{index}] {agent}: {output} -- {agent}{{}}", "solver", 2) == (
        "\n[2] solver: ",
        " -- solver{}",
    )


def test_a_slot_may_be_nothing_but_its_output() -> None:
    assert slot_parts("{output}", "a", 1) == ("", "")


@pytest.mark.parametrize(
    "template", ["", "text", "{output}{output}", "{output} {question}", "{output!s}"]
)
def test_a_slot_that_cannot_be_parted_is_refused(template: str) -> None:
    with pytest.raises(InvalidField, match=r"^prompt\.slot: "):
        read_sent(Prompt, {"slot": template}, "prompt")


def test_the_default_aggregator_can_prefill_nearly_everything_early() -> None:
    assert len(AGGREGATOR.suffix.split()) <= 5
    assert slot_parts(AGGREGATOR.slot, "a", 3) == ("\n\nDraft 3:\n", "")
    assert fill_text(AGGREGATOR.prefix, "1+1?").endswith("1+1?")
