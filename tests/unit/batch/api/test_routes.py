"""The body of a new batch: what is read and what is refused."""

import pytest

from shell_router.batch.api.routes import BATCH, read_batch
from shell_router.batch.api.storage import BatchRecord
from shell_router.errors import InvalidField

ASKED = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


def read(fields: dict[str, object]) -> BatchRecord:
    return read_batch(BATCH.read({**ASKED, **fields}), "batch_1", "alice", 100)


def test_a_batch_is_read() -> None:
    asked = read({"metadata": {"a": "b"}})
    assert (asked.input_file_id, asked.expires_at, asked.metadata) == ("file-1", 86_500, {"a": "b"})


@pytest.mark.parametrize(("window", "seconds"), [("1h", 3600), ("168h", 604_800)])
def test_a_window_is_any_number_of_hours(window: str, seconds: int) -> None:
    assert read({"completion_window": window}).expires_at == 100 + seconds


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_file_id": None},
        {"input_file_id": 3},
        {"endpoint": "/v1/embeddings"},
        {"endpoint": None},
        {"completion_window": "0h"},
        {"completion_window": "24"},
        {"completion_window": "99999h"},
        {"metadata": []},
        {"metadata": {"a": 1}},
    ],
)
def test_what_is_wrong_is_refused_by_field(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidField) as refused:
        read(wrong)
    assert refused.value.field.split(".")[0] == next(iter(wrong))
