"""A client's native request body: checked once, extended as bytes, so that nothing in it is ever rewritten."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from shell_router.errors import InvalidRequest

_RESERVED = "bootstrap_"


@dataclass(frozen=True, slots=True)
class NativeBody:
    """A JSON object in SGLang's native shape.

    `rids` name every request in it to the engines (a batch has several), `opened` is the object without its closing
    brace, with a `rid` in it.
    """

    rids: tuple[str, ...]
    stream: bool
    opened: bytes

    def with_fields(self, fields: Mapping[str, Any]) -> bytes:
        """The body with `fields` added at its end, every other byte as the client wrote it."""
        if not fields:
            return self.opened + b"}"
        return self.opened + b"," + orjson.dumps(fields)[1:]

    def replaced(self, fields: Mapping[str, Any]) -> bytes:
        """The body with `fields` in place of the client's; numbers may be written differently afterwards."""
        found = orjson.loads(self.opened + b"}")
        sampling = {**(found.get("sampling_params") or {}), **fields.get("sampling_params", {})}
        return orjson.dumps({**found, **fields, "sampling_params": sampling})


def read_native(body: bytes, fresh_rid: str) -> NativeBody:
    """Check `body` and give it `fresh_rid` unless it names itself; raises InvalidRequest."""
    found = _read_object(body)
    _refuse_reserved(found)
    if not isinstance(found.get("sampling_params") or {}, dict):
        raise InvalidRequest("`sampling_params` is not an object.", remedy="Make it one, or leave it out.")
    opened = body.rstrip()[:-1].rstrip()
    rid = found.get("rid")
    if rid is None:
        if "rid" in found:
            raise InvalidRequest("`rid` is null.", remedy="Leave it out, or make it a string.")
        rid = fresh_rid
        opened += (b"," if found else b"") + b'"rid":' + orjson.dumps(rid)
    elif body.count(b'"rid"') > 1:
        _refuse_repeated_rid(body)
    return NativeBody(_rids(rid, found), found.get("stream") is True, opened)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", remedy="Send one JSON object.") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"The body is a JSON {type(found).__name__}.", remedy="Send one JSON object.")
    return found


def _refuse_reserved(found: Mapping[str, Any]) -> None:
    reserved = sorted(name for name in found if name.startswith(_RESERVED))
    if reserved:
        raise InvalidRequest(
            f"The body sets {', '.join(reserved)}, which the router chooses.", remedy="Leave these fields out."
        )


def _refuse_repeated_rid(body: bytes) -> None:
    """Two top-level `rid`s could be read differently here and on the engine, and an abort would miss."""

    def names_rid_twice(pairs: list[tuple[str, Any]]) -> int:
        return sum(name == "rid" for name, _ in pairs)

    if json.loads(body, object_pairs_hook=names_rid_twice) > 1:  # the outermost object is counted last
        raise InvalidRequest("The body names `rid` twice.", remedy="Name it once.")


def _rids(rid: object, found: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids the engine gives the requests of this body (SGLang appends `_<index>` to a batch's single `rid`)."""
    if isinstance(rid, list) and rid and all(isinstance(one, str) and one for one in rid):
        return tuple(rid)
    if not isinstance(rid, str) or not rid:
        raise InvalidRequest("`rid` is neither a string nor a list of strings.", remedy="Leave it out.")
    size = _batch_size(found)
    return (rid,) if size is None else tuple(f"{rid}_{index}" for index in range(size))


def _batch_size(found: Mapping[str, Any]) -> int | None:
    text, ids = found.get("text"), found.get("input_ids")
    if isinstance(text, list):
        return len(text)
    return len(ids) if isinstance(ids, list) and ids and isinstance(ids[0], list) else None
