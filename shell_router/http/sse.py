"""Server-sent events, written."""

from typing import Any

import orjson

PING = b": ping\n\n"
"""A comment, which clients ignore."""
DONE = b"data: [DONE]\n\n"
"""The end of OpenAI's streams."""


def data_frame(body: Any) -> bytes:
    """Return an unnamed event whose data is `body` as JSON."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
