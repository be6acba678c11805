"""Which of several rules is taken."""

import re
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shell_router.errors import InvalidRequest
from shell_router.topology.rules import (
    END,
    Classed,
    Facts,
    Rule,
    Transition,
    Unclassified,
    Unscored,
    When,
    choose,
    has_match,
    pattern_error,
)

FACTS = Facts({"kind": "sum"}, "What is 1 + 1?", "It is 2.", 0.8)
OTHERWISE = Rule(END)


def taken(when: When, facts: Facts = FACTS) -> bool:
    found = choose((Rule("there", when), OTHERWISE), facts)
    assert isinstance(found, Transition)
    return found.go == "there"


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        (When(labels={"kind": ("sum",)}), True),
        (When(labels={"kind": ("poem", "sum")}), True),
        (When(labels={"kind": ("poem",)}), False),
        (When(labels={"kind": ("sum",), "who": ("me",)}), False),
        (When(matches=r"\d \+"), True),
        (When(matches=r"^is"), False),
        (When(matches="(?i)WHAT"), True),
        (When(matches="is 2", of="output"), True),
        (When(matches="is 2", of="request"), False),
        (When(confidence_below=0.9), True),
        (When(confidence_below=0.8), False),
        (When(labels={"kind": ("sum",)}, matches="1", confidence_below=0.9), True),
        (When(labels={"kind": ("sum",)}, matches="1", confidence_below=0.7), False),
    ],
)
def test_a_condition_holds_when_all_it_says_does(when: When, holds: bool) -> None:
    assert taken(when) is holds


def test_the_first_rule_that_holds_is_taken_and_says_why() -> None:
    rules = (
        Rule("a", When(matches="poem")),
        Rule("b", When(matches="What")),
        Rule("c", When(matches="is")),
        OTHERWISE,
    )
    assert choose(rules, FACTS) == Transition("b", 2, "request matches 'What'")
    assert choose(rules, replace(FACTS, request="?")) == Transition(END, 4, "otherwise")
    assert choose((OTHERWISE,), FACTS) == Transition(END, 1, "always")


SLOW = "((a{0,30}){0,30}){0,1}b"


def test_patterns_may_take_so_many_steps_together_and_no_more() -> None:
    facts = replace(FACTS, request="a" * 9_000)
    slow = Rule("there", When(matches=f"{SLOW}c"))
    assert choose((slow, OTHERWISE), facts) == Transition(END, 2, "otherwise")
    rules = [Rule("there", When(matches=f"{SLOW}{number}")) for number in range(99)]
    with pytest.raises(InvalidRequest, match=r"^The patterns of the rules take .* nested"):
        choose((*rules, OTHERWISE), facts)
    words = "|".join(f"keyword number {number}" for number in range(100))
    rules = [Rule("there", When(matches=words, of="output"))] * 99
    assert choose((*rules, OTHERWISE), replace(FACTS, output="lorem ipsum " * 9_000)) == (
        Transition(END, 100, "otherwise")
    )


def test_a_choice_that_is_left_tries_no_further_rule() -> None:
    with pytest.raises(CancelledError):
        choose((Rule("there", When(matches="What")), OTHERWISE), FACTS, lambda: True)


def test_a_classifier_is_asked_only_when_all_else_holds() -> None:
    asks = When(labels={"kind": ("sum",)}, classifier="subject", classes=("maths",))
    assert choose((Rule("a", asks), OTHERWISE), FACTS) == Unclassified("subject", "request")
    assert choose((Rule("a", asks), OTHERWISE), replace(FACTS, labels={})) == Transition(
        END, 2, "otherwise"
    )


def test_scores_are_asked_for_only_when_all_else_holds_and_before_a_classifier() -> None:
    asks = When(
        matches="What", scores_below={"small": 0.5}, classifier="subject", classes=("maths",)
    )
    assert choose((Rule("a", asks), OTHERWISE), FACTS) == Unscored()
    assert choose((Rule("a", asks), OTHERWISE), replace(FACTS, request="?")) == Transition(
        END, 2, "otherwise"
    )
    assert choose((Rule("a", asks), OTHERWISE), replace(FACTS, scores={"small": 0.4})) == (
        Unclassified("subject", "request")
    )


@pytest.mark.parametrize(
    ("scores", "holds"),
    [({"a": 0.4, "b": 0.6}, True), ({"a": 0.5, "b": 0.6}, False), ({"a": 0.4}, False), ({}, False)],
)
def test_every_score_that_is_named_has_to_be_lower(scores: dict[str, float], holds: bool) -> None:
    assert taken(When(scores_below={"a": 0.5, "b": 0.7}), replace(FACTS, scores=scores)) is holds


@pytest.mark.parametrize(
    ("said", "holds"),
    [(Classed("maths", 0.7), True), (Classed("poems", 0.7), False), (Classed("", 0.1), False)],
)
def test_a_class_decides_once_it_is_known(said: Classed, holds: bool) -> None:
    asks = When(classifier="subject", classes=("maths",))
    assert taken(asks, replace(FACTS, classes={("subject", "request"): said})) is holds


def test_what_could_not_be_classified_has_none_of_the_classes() -> None:
    assert not taken(
        When(classifier="subject", classes=("maths", "")),
        replace(FACTS, classes={("subject", "request"): None}),
    )


def test_no_tokens_are_no_confidence() -> None:
    assert taken(When(confidence_below=0.01), replace(FACTS, output="", confidence=None))


RULES = st.lists(
    st.builds(
        Rule,
        st.sampled_from("abc"),
        st.one_of(
            st.builds(
                When,
                matches=st.sampled_from(["a", "b", "^c"]),
                of=st.sampled_from(["request", "output"]),
            ),
            st.builds(
                When,
                labels=st.dictionaries(
                    st.sampled_from("xy"), st.tuples(st.sampled_from("01")), min_size=1
                ),
            ),
            st.builds(When, confidence_below=st.floats(0.01, 1.0)),
        ),
    ),
    max_size=6,
)
ANY_FACTS = st.builds(
    Facts,
    st.dictionaries(st.sampled_from("xy"), st.sampled_from("01")),
    st.text("abc", max_size=4),
    st.text("abc", max_size=4),
    st.one_of(st.none(), st.floats(0.0, 1.0)),
)


@given(RULES, ANY_FACTS)
def test_rules_before_the_one_taken_do_not_hold_and_it_does(
    rules: list[Rule], facts: Facts
) -> None:
    found = choose((*rules, OTHERWISE), facts)
    assert isinstance(found, Transition)
    assert not any(taken(rule.when, facts) for rule in rules[: found.rule - 1] if rule.when)
    assert found.rule > len(rules) or (
        rules[found.rule - 1].go == found.go and taken(rules[found.rule - 1].when, facts)
    )


@pytest.mark.filterwarnings(
    "ignore:Possible set:FutureWarning", "ignore:Possible nested set:FutureWarning"
)
@given(st.text("ab(|)*.+?[^]x1", max_size=8), st.text("abx1", max_size=12))
@example("[[]", "")
@example("[||]", "")
def test_patterns_find_what_pythons_do(pattern: str, text: str) -> None:
    if not pattern_error(pattern):
        try:
            expected = re.search(pattern, text) is not None
        except re.error:  # repeats of repeats are RE2's alone
            return
        assert has_match(pattern, text) is expected


def test_a_pattern_that_takes_others_forever_ends_soon() -> None:
    # 2 ** 50000 ways for an engine that goes back; this one reads each character once, or the test
    # never ends
    assert not has_match(r"^(a+)+$", "a" * 50_000 + "!")


def test_a_pattern_that_would_take_much_memory_is_refused() -> None:
    # 99 like it in one client's topology took 366 MB for good
    assert pattern_error(r"(?i)(?:[\pL\pN]{5}){60}x") == "pattern too large - compile failed"
    assert pattern_error("|".join(f"(?i)word{at}" for at in range(1000))) == ""
