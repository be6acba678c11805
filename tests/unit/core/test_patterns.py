"""Only patterns that cannot keep an engine busy stop an output."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.patterns import bound_steps
from shell_router.core.sampling import MAX_STOP_STEPS, check_sampling
from shell_router.errors import InvalidField


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "a*",
        "a+",
        "a{2,}",
        "a*?b",
        "a?" * 30 + "a" * 30,
        "(a|a)" * 30 + "b",
        "(a|a){30}b",
        "((a{0,30}){0,30}){0,1}b",
        "(a{0,9}){0,9}",
        "a{0,99}a{0,99}b",
        ".{0,4294967294}x",
        "((((a{0,9999}){0,9999}){0,9999}){0,9999}){0,9999}",
        r"(a)\1",
        "(?=a)b",
        "(?<!a)b",
        "(?>a)b",
        "a++b",
        "(a)(?(1)b|c)",
        "[^a]",
        "(",
        "[a",
        "*",
        "a{3,2}",
        "(" * 120 + "a" + ")" * 120 + "*",
    ],
)
def test_a_stop_pattern_without_a_small_bound_is_refused(pattern: str) -> None:
    for value in (pattern, ["x", pattern]):
        with pytest.raises(InvalidField) as refused:
            check_sampling({"stop_regex": value})
        assert refused.value.field == "stop_regex" and refused.value.remedy


def test_patterns_that_are_cheap_alone_are_not_taken_in_any_number() -> None:
    pattern = r"\w{1,60}"
    check_sampling({"stop_regex": pattern})
    with pytest.raises(InvalidField):
        check_sampling({"stop_regex": [pattern] * 2})


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "Answer:",
        r"\n\n(User|Human):",
        r"(foo|bar)\s{0,8}:\s{0,8}",
        r"^\d{1,3}(\.\d{1,3}){3}$",
        r"[^\r\n]{0,60}\Z",
        r"(?i:the )end\b.?",
        "x" * 256,
    ],
)
def test_stop_patterns_of_bounded_length_are_taken(pattern: str) -> None:
    check_sampling({"stop_regex": pattern})


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@given(st.text("ab(|){}023,.?^$", max_size=16))
def test_a_bound_is_found_for_patterns_of_python_alone_and_holds_for_their_matches(
    pattern: str,
) -> None:
    steps = bound_steps(pattern)
    if steps > MAX_STOP_STEPS:
        return
    longest = max((len(match[0]) for match in re.finditer(pattern, "ab" * 99)), default=0)
    assert longest <= steps
