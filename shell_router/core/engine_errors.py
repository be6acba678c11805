"""What an engine says in an error body."""

import orjson

_MESSAGE_CHARACTERS = 2000


def error_message(body: bytes) -> str:
    """The engine's own words in an error body of any of SGLang's shapes, shortened."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")[:_MESSAGE_CHARACTERS]
    for key in ("error", "message", "detail", "error_message"):
        while isinstance(found, dict) and key in found:
            found = found[key]
    return (found if isinstance(found, str) else orjson.dumps(found).decode())[:_MESSAGE_CHARACTERS]
