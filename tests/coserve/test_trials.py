from collections import Counter
from pathlib import Path
from random import Random

import pytest

from benchmarks.coserve.pool.profiling import drawn_chains, read_chains
from benchmarks.coserve.pool.usage import ChainRule
from shell_router.errors import DataError

pytestmark = pytest.mark.slow


def test_a_sample_gives_its_chains_in_order(tmp_path: Path) -> None:
    file = tmp_path / "sample.jsonl"
    file.write_text('{"chain": ["a", "b"]}\n\n{"chain": ["c"], "more": 1}\n', encoding="utf-8")
    assert read_chains(file, "abc") == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"chian": ["a"]}', "no chain"),
        ('{"chain": "a"}', "list of names"),
        ('{"chain": []}', "names no component"),
        ('{"chain": ["a", "a"]}', "twice"),
        ('{"chain": ["x"]}', "no component 'x'"),
    ],
)
def test_a_line_that_is_no_chain_is_reported_with_its_number(
    tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "sample.jsonl"
    file.write_text(f'{{"chain": ["a"]}}\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=rf"sample\.jsonl:2: .*{message}"):
        read_chains(file, "abc")


def test_a_sample_that_is_empty_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    for name in ("empty", "none"):
        with pytest.raises(DataError, match=name):
            read_chains(tmp_path / name, "abc")


def test_chains_are_drawn_by_the_rules_shares_and_again_the_same() -> None:
    rules = [ChainRule(("a", "b"), 3), ChainRule(("c",), 1)]
    drawn = drawn_chains(rules, 4000, Random(1))
    assert Counter(drawn)["a", "b"] == pytest.approx(3000, abs=150)
    assert drawn == drawn_chains(rules, 4000, Random(1))
