"""Results that are appended as they come, and found again."""

import json
from pathlib import Path

import pytest

from shell_router.batch.api.lines import LineResult, Results

GOOD = LineResult("good", "r1", 200, {"answer": 1})
BAD = LineResult("bad", "r2", 404, {"error": {"code": "model_not_found"}})
CUT = LineResult("cut", "r3", error={"code": "batch_expired", "message": "too late"})


def results(folder: Path) -> Results:
    found = Results(folder / "output", folder / "errors")
    found.recover()
    return found


def names(path: Path) -> list[str]:
    return [json.loads(one)["custom_id"] for one in path.read_bytes().splitlines()]


def test_answers_and_errors_go_to_files_of_their_own(tmp_path: Path) -> None:
    kept = results(tmp_path)
    kept.add((GOOD, BAD, CUT))
    assert (names(tmp_path / "output"), names(tmp_path / "errors")) == (["good"], ["bad", "cut"])
    assert (kept.completed, kept.failed) == (1, 2)


def test_a_result_is_one_line_to_every_reader_of_text() -> None:
    text = "roses\u2028are\u2029red\x85violets\n\x1c\x0bare"
    line = LineResult("x", "r", 200, {"answer": text}).as_line().decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["response"]["body"]["answer"] == text


def test_a_line_has_the_shape_that_openais_clients_expect() -> None:
    assert json.loads(BAD.as_line()) == {
        "id": "batch_req_r2",
        "custom_id": "bad",
        "response": {
            "status_code": 404,
            "request_id": "r2",
            "body": {"error": {"code": "model_not_found"}},
        },
        "error": None,
    }
    assert json.loads(CUT.as_line())["response"] is None
    assert json.loads(CUT.as_line())["error"]["code"] == "batch_expired"


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    results(tmp_path).add((GOOD, BAD))
    found = results(tmp_path)
    assert (found.completed, found.failed) == (1, 1)
    assert "good" in found and "bad" in found and "cut" not in found


@pytest.mark.parametrize("torn", [b'{"custom_id": "x"}', b"\0\0\0\0\n", b"{}\n"])
def test_a_torn_end_is_cut_off_and_what_follows_stands_on_a_line_of_its_own(
    tmp_path: Path, torn: bytes
) -> None:
    results(tmp_path).add((GOOD,))
    with (tmp_path / "output").open("ab") as file:
        file.write(torn)
    found = results(tmp_path)
    assert found.completed == 1
    found.add((LineResult("next", "r4", 200, {}),))
    assert names(tmp_path / "output") == ["good", "next"]


def test_what_cannot_be_kept_does_not_count(tmp_path: Path) -> None:
    kept = results(tmp_path)
    (tmp_path / "output").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        kept.add((GOOD,))
    assert kept.completed == 0 and "good" not in kept
