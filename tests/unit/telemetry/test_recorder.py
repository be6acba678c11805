import logging
import os
import resource
import signal
import threading
from collections import Counter
from pathlib import Path

import orjson
import pytest

from shell_router.telemetry.recorder import MOST_WAITING, LogLines, Recorder


def counted(folder: Path, max_file_bytes: int = 2**20) -> tuple[Recorder, Counter[str]]:
    counts: Counter[str] = Counter()
    recorder = Recorder(
        "access log", folder, max_file_bytes, lambda outcome, lines: counts.update({outcome: lines})
    )
    return recorder, counts


def lines_in(folder: Path) -> list[object]:
    return [
        orjson.loads(line)
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_bytes().splitlines()
    ]


def test_lines_are_written_in_order_into_files_of_the_wanted_size(tmp_path: Path) -> None:
    recorder, counts = counted(tmp_path / "traces", max_file_bytes=20)
    for number in range(9):
        recorder.add(lambda number=number: [{"n": number}])  # type: ignore[misc]
    recorder.close()
    assert lines_in(tmp_path / "traces") == [{"n": number} for number in range(9)]
    files = list((tmp_path / "traces").iterdir())
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}, (
        "they hold questions of all tenants"
    )
    assert counts == {"written": 9}


def test_where_nothing_can_be_written_lines_are_lost_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    recorder, counts = counted(tmp_path / "taken")
    for _ in range(3):
        recorder.add(lambda: [{"n": 1}, {"n": 2}])
    recorder.close()
    assert counts == {"lost": 6}
    assert [record.message.partition(" lost")[0] for record in caplog.records] == [
        "access log: lines are"
    ]


def test_a_line_that_cannot_be_made_loses_no_other(tmp_path: Path) -> None:
    recorder, counts = counted(tmp_path)
    recorder.add(lambda: [{"n": object()}])
    recorder.add(lambda: [{"n": 2}])
    recorder.close()
    assert lines_in(tmp_path) == [{"n": 2}]
    assert counts == {"lost": 1, "written": 1}


def test_no_run_waits_for_the_writer_and_what_is_too_much_is_lost(tmp_path: Path) -> None:
    recorder, counts = counted(tmp_path)
    gate = threading.Event()
    recorder.add(lambda: [{"waited": gate.wait(60)}])
    for _ in range(MOST_WAITING + 5):
        recorder.add(list)
    assert counts["lost"] >= 4  # the first may have been taken already
    gate.set()
    recorder.close()
    assert lines_in(tmp_path) == [{"waited": True}]


def test_a_line_cut_by_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    recorder, counts = counted(tmp_path)
    recorder.add(lambda: [{"n": 1}])
    recorder.close()
    whole = next(iter(tmp_path.iterdir()))
    before = whole.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 3, hard))
    try:
        recorder._write(b'{"n": 2222222222}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert whole.read_bytes() == before
    assert counts == {"written": 1, "lost": 1}


def test_a_record_that_cannot_be_formatted_is_a_line_and_no_error_of_what_logs() -> None:
    reading, writing = os.pipe()
    lines = LogLines(writing)
    lines.emit(logging.makeLogRecord({"name": "lib", "msg": "%d", "args": ("x",)}))
    with os.fdopen(reading, encoding="utf-8") as log:
        assert log.readline().startswith("A line of lib could not be made: TypeError")
    os.close(writing)


def test_a_reader_of_the_log_that_stalls_holds_nothing_up_and_learns_what_it_missed() -> None:
    reading, writing = os.pipe()
    lines, lost, read = LogLines(writing), Counter[str](), list[str]()
    lines.lost = lambda count: lost.update(lines=count)
    written = MOST_WAITING * 3
    for number in range(written):
        lines.emit(logging.makeLogRecord({"msg": f"{number} {'x' * 100}"}))
    assert lost["lines"], "nothing is read, and the pipe holds 64 KiB"
    with os.fdopen(reading, encoding="utf-8") as log:
        reader = threading.Thread(target=lambda: read.extend(log))
        reader.start()
        while "last\n" not in read[-2:]:
            lines.flush()
            lines.emit(logging.makeLogRecord({"msg": "last"}))
        lines.flush()
        os.close(writing)
        reader.join()
    place = 0
    for line in read[: read.index("last\n")]:
        first, what = line.split(maxsplit=1)
        if what.startswith("log lines are lost"):
            place += int(first)
        else:
            assert int(first) == place
            place += 1
    assert place >= written  # more where a last line was lost
    assert lost["lines"] + sum("xxx" in line for line in read) == place
