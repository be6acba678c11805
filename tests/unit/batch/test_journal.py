import os
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shell_router.batch.journal import Journal, Output, open_journal
from shell_router.errors import ConfigError
from tests.fakes.disk import full_disk

RUN = {"questions": "abc", "seed": 0, "proposers": ("small", "large")}


def output(number: int, error: str = "", role: str = "proposer", model: str = "small") -> Output:
    return Output(
        f"q{number}", role, model, f"Text {number}\nof two lines é", 0.5, 10, number, error
    )  # type: ignore[arg-type]


def lines(folder: Path) -> list[bytes]:
    return (folder / "outputs.jsonl").read_bytes().splitlines()


def written(folder: Path, *outputs: Output) -> bytes:
    with open_journal(folder, RUN) as journal:
        for one in outputs:
            journal.add(one)
    return (folder / "outputs.jsonl").read_bytes()


def kept(folder: Path) -> list[Output]:
    """The first outputs that a later run finds."""
    with open_journal(folder, RUN) as journal:
        return [found for number in (1, 2, 3) if (found := journal.get(output(number).key))]


def test_what_was_written_is_there_again_when_the_run_goes_on(tmp_path: Path) -> None:
    written(tmp_path / "new" / "run", output(1), output(2))
    with open_journal(tmp_path / "new" / "run", RUN) as journal:
        assert journal.get(output(1).key) == output(1)
        assert journal.get(output(3).key) is None
        assert not journal.lacks(output(2).key)
        assert journal.lacks(output(3).key)
    assert kept(tmp_path / "new" / "run") == [output(1), output(2)]


def test_an_output_is_on_disk_before_it_counts(tmp_path: Path) -> None:
    with open_journal(tmp_path, RUN) as journal:
        journal.add(output(1))
        assert len(lines(tmp_path)) == 1


def test_an_error_is_tried_again_and_the_last_output_counts(tmp_path: Path) -> None:
    written(tmp_path, output(1, error="no"))
    with open_journal(tmp_path, RUN) as journal:
        assert journal.lacks(output(1).key)
        journal.add(output(1))
        assert not journal.lacks(output(1).key)
    with open_journal(tmp_path, RUN) as journal:
        assert journal.get(output(1).key) == output(1)


def test_wherever_a_line_is_torn_only_its_output_is_lost(tmp_path: Path) -> None:
    whole = written(tmp_path, output(1), output(2))
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        (tmp_path / "outputs.jsonl").write_bytes(whole[:end])
        assert written(tmp_path, output(3)) == whole[:first] + orjson.dumps(output(3)) + b"\n"
        assert kept(tmp_path) == [output(1), output(3)]


@pytest.mark.parametrize(
    "broken", [b"{", b"", b"5", b"null", b"[]", b"{}", b'{"question": "q2"}', b"\x00" * 40, b"\xff"]
)
def test_a_line_in_the_middle_that_is_no_output_is_passed_over(
    tmp_path: Path, broken: bytes
) -> None:
    whole = written(tmp_path, output(1))
    (tmp_path / "outputs.jsonl").write_bytes(broken + b"\n" + whole)
    with open_journal(tmp_path, RUN) as journal:
        assert not journal.lacks(output(1).key)
    assert kept(tmp_path) == [output(1)]


def test_another_run_is_refused_with_the_names_of_what_differs(tmp_path: Path) -> None:
    written(tmp_path, output(1))
    other = {**RUN, "seed": 1, "proposers": ("small",), "sampling": {"top_p": 1}}
    with (
        pytest.raises(
            ConfigError,
            match=r"other seed, proposers, sampling\. Name another folder, .* send the batch again",
        ),
        open_journal(tmp_path, other),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="with other seed"),
        open_journal(tmp_path, {**RUN, "seed": None}),
    ):
        pass
    with open_journal(tmp_path, dict(reversed(RUN.items()))) as journal:
        assert not journal.lacks(output(1).key)


def test_two_runs_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path, {"seed": 0}),
        pytest.raises(ConfigError, match="another run is at work there"),
        open_journal(tmp_path, {"seed": 0}),
    ):
        pass
    with open_journal(tmp_path, {"seed": 0}):
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with (
        pytest.raises(ConfigError, match=r"run\.json is not what a run writes"),
        open_journal(tmp_path, RUN),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run: Not a directory\. Name another folder"):
        written(tmp_path / "file" / "run")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        written(tmp_path)


def test_an_error_of_what_runs_is_not_taken_for_one_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError), open_journal(tmp_path, RUN):
        raise ConnectionError("somewhere else")


@given(st.integers(0, 400))
@example(151)
def test_on_a_full_disk_the_error_says_what_to_do_and_the_next_output_is_not_glued_to_what_it_took(
    room: int,
) -> None:
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "outputs.jsonl")
        with full_disk(room):
            kept = [one for one in map(output, range(3)) if _added(journal, one)]
        journal.add(output(8))
        journal.add(output(9))
        found = [Output(**orjson.loads(line)) for line in lines(Path(folder))]
    assert found == [*kept, output(8), output(9)]
    assert [one for one in map(output, range(3)) if not journal.lacks(one.key)] == kept


def _added(journal: Journal, one: Output) -> bool:
    try:
        journal.add(one)
    except ConfigError as error:
        assert "outputs.jsonl: File too large. Free disk space and run the same" in str(error)
        return False
    return True


def test_an_experts_late_answer_voids_what_the_aggregator_wrote_without_it(tmp_path: Path) -> None:
    aggregated = [output(number, role="aggregator", model="large") for number in (1, 2)]
    written(tmp_path, output(1, error="no"), output(2), *aggregated)
    with open_journal(tmp_path, RUN) as journal:
        assert not journal.lacks(aggregated[0].key)
        journal.add(output(1, error="no"))
        assert not journal.lacks(aggregated[0].key)
        journal.add(output(1))
        assert journal.lacks(aggregated[0].key)
        assert not journal.lacks(aggregated[1].key)
    with open_journal(tmp_path, RUN) as journal:
        assert journal.lacks(aggregated[0].key)
        assert not journal.lacks(aggregated[1].key)
