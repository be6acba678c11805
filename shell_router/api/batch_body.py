"""Reading the body of a new batch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shell_router.api.fields import Fields

ENDPOINT = "/v1/chat/completions"
WINDOW = re.compile(r"([1-9][0-9]{0,3})h", re.ASCII)


@dataclass(frozen=True, slots=True)
class BatchBody:
    """A batch as asked."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None


def read_batch(body: Fields) -> BatchBody:
    """Raises InvalidField for what is missing, wrong or not served."""
    endpoint, window = body.required_text("endpoint"), body.required_text("completion_window")
    if endpoint != ENDPOINT:
        raise body.refuse("endpoint", f"must be {ENDPOINT}")
    hours = WINDOW.fullmatch(window)
    if hours is None:
        raise body.refuse("completion_window", "must be a number of hours", "Write 24h.")
    return BatchBody(body.required_text("input_file_id"), endpoint, window, 3600 * int(hours[1]), _metadata(body))


def _metadata(body: Fields) -> Mapping[str, str] | None:
    metadata = body.raw("metadata")
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise body.refuse("metadata", "must be an object of strings")
    return metadata
