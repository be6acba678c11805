from itertools import combinations, pairwise

import pytest

from shell_router.core.marks import REASONING_PARSERS, ReasoningMarks, ReasoningSplit


def split(parser: str, prompt_end: str, pieces: list[str]) -> tuple[str, str]:
    """All thinking, and all answer."""
    reader = ReasoningSplit(REASONING_PARSERS[parser], prompt_end)
    found = [reader.feed(piece) for piece in pieces] + [reader.finish()]
    return "".join(thinking for thinking, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("parser", "prompt_end", "output", "expected"),
    [
        ("qwen3", "", "<think>\nHm, <i>.</think>\n\nYes </think>.", ("Hm, <i>.", "Yes </think>.")),
        ("qwen3", "", "  <thin ice\n", ("", "<thin ice\n")),
        ("qwen3", "<think>\n\n</think>\n\n", "\nNo </think>", ("", "No </think>")),
        ("qwen3", "<think>\n", "a</thi</think>b", ("a</thi", "b")),
        ("deepseek-r1", "", "a <think> b</think>c", ("a <think> b", "c")),
        ("deepseek-r1", "", "<think>a</thin", ("a</thin", "")),
        ("deepseek-r1", "", "</think> b", ("", "b")),
        ("kimi", "", "◁think▷a◁/think▷ b", ("a", "b")),
        ("deepseek-r1", "", "  <th", ("<th", "")),
        ("qwen3", "", " \n", ("", "")),
    ],
)
def test_the_split_is_the_same_however_the_output_is_cut(
    parser: str, prompt_end: str, output: str, expected: tuple[str, str]
) -> None:
    for cuts in (*combinations(range(len(output) + 1), 2), range(len(output))):
        bounds = [0, *cuts, len(output)]
        pieces = [output[start:stop] for start, stop in pairwise(bounds)]
        assert split(parser, prompt_end, pieces) == expected


def test_the_thought_is_kept_as_it_was_written() -> None:
    """So that it can be put into another prompt."""
    reader = ReasoningSplit(ReasoningMarks(), "")
    for piece in (" <thi", "nk>\n Hm", "</", "think>", " Yes"):
        reader.feed(piece)
    assert (reader.thought, reader.stage, reader.passes) == ("<think>\n Hm", "answer", True)
