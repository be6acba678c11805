"""A client's native request body: checked once, extended as bytes, so that nothing in it is ever rewritten."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from shell_router.core.engine import value
from shell_router.core.sampling import check_depth, check_sampling
from shell_router.errors import InvalidRequest

SHORTEST_RID = 32
_RESERVED = "bootstrap_"
_PROMPTS = {"input_ids", "messages", "prompt", "tools"}
ADAPTER = "lora_path"
"""SGLang's field for the name of a request's adapter."""


@value
class NativeBody:
    """A JSON object in SGLang's native shape.

    `rids` name every request in it to the engines (a batch has several), and `named` says whether the client did;
    `opened` is the object without its closing brace, with a `rid` in it, and with the adapter that shall answer where
    there is one. With `input_logprobs` the answer shall hold log probabilities of the prompt.
    """

    rids: tuple[str, ...]
    named: bool
    stream: bool
    input_logprobs: bool
    opened: bytes

    def with_fields(self, fields: Mapping[str, Any]) -> bytes:
        """The body with `fields` added at its end, every other byte as the client wrote it."""
        if not fields:
            return self.opened + b"}"
        return self.opened + b"," + orjson.dumps(fields)[1:]

    def replaced(self, fields: Mapping[str, Any]) -> bytes:
        """The body with `fields` in place of the client's; numbers may be written differently afterwards."""
        found = orjson.loads(self.opened + b"}")
        own, given = fields.get("sampling_params", {}), found.get("sampling_params") or {}
        sampling = [{**one, **own} for one in given] if isinstance(given, list) else {**given, **own}
        return orjson.dumps({**found, **fields, "sampling_params": sampling})


@dataclass(frozen=True, slots=True)
class NativeRules:
    """What a model asks of bodies.

    Token ids must lie below `vocabulary`, where it is known: SGLang ends at one that does not. With `adapters` the
    model has some, which the router loads, so that no body may name one itself.
    """

    vocabulary: int | None = None
    adapters: bool = False


ANY_MODEL = NativeRules()


def read_native(
    body: bytes, fresh_rid: str, rules: NativeRules = ANY_MODEL, adapter: str | None = None, *, openai: bool = False
) -> NativeBody:
    """Check `body` by `rules`, give it `fresh_rid` unless it names itself, and `adapter`; raises InvalidRequest.

    One of SGLang's `openai` routes has its sampling parameters among the other fields.
    """
    found = _read_object(body)
    if reserved := sorted([name for name in found if name.startswith(_RESERVED)]):
        raise InvalidRequest(
            f"The body sets {', '.join(reserved)}, which the router chooses.", remedy="Leave these fields out."
        )
    if rules.adapters and found.get(ADAPTER) is not None:
        raise InvalidRequest(
            f"The body sets {ADAPTER}, which the router chooses by the model.",
            remedy="Leave it out, and name a model such as base:adapter; /v1/models lists them.",
        )
    if rules.vocabulary is not None:
        for name in ("input_ids", "prompt"):
            _check_ids(name, found.get(name), rules.vocabulary)
    _check_sampling(found, rules.vocabulary, openai)
    for start in as_list(found.get("logprob_start_len")):
        if isinstance(start, int) and start < -1:  # SGLang's prefill server ends at one
            raise InvalidRequest(f"`logprob_start_len` is {start}.", remedy="Make it -1 (no prompt tokens) or more.")
    opened = body.rstrip()[:-1].rstrip()
    rid, named = found.get("rid"), "rid" in found
    if rid is None:
        if named:
            raise InvalidRequest("`rid` is null.", remedy="Leave it out, or make it a string.")
        rid = fresh_rid
        opened += (b"," if found else b"") + b'"rid":' + orjson.dumps(rid)
    else:
        _check_rid(rid)
        if body.count(b'"rid"') > 1:
            _refuse_repeated_rid(body)
    if adapter is not None:
        opened += b',"%s":%s' % (ADAPTER.encode(), orjson.dumps(adapter))
    return NativeBody(_rids(rid, found), named, found.get("stream") is True, wants_input_logprobs(found), opened)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", remedy="Send one JSON object.") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"The body is a JSON {type(found).__name__}.", remedy="Send one JSON object.")
    return found


def _check_ids(name: str, ids: object, vocabulary: int) -> None:
    """Token ids of one prompt, or a list of such lists. What is neither is left to the engine to refuse."""
    if not isinstance(ids, list) or not ids:
        return
    if isinstance(ids[0], list):
        for one in ids:
            _check_ids(name, one, vocabulary)
    elif set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary:
        raise InvalidRequest(
            f"`{name}` holds something else than token ids below {vocabulary}.", remedy="Tokenize for this model."
        )


def _check_sampling(found: Mapping[str, Any], vocabulary: int | None, openai: bool) -> None:
    """`sampling_params`: an object, or for a batch one for each of its requests."""
    if openai:
        check_depth(found, "body")
        check_sampling({name: found[name] for name in found.keys() - _PROMPTS}, vocabulary)
        return
    given = found.get("sampling_params")
    for one in given if isinstance(given, list) else [given or {}]:
        if not isinstance(one, dict):
            raise InvalidRequest("`sampling_params` is not an object.", remedy="Make it one, or leave it out.")
        check_sampling(one, vocabulary, "sampling_params")


def _refuse_repeated_rid(body: bytes) -> None:
    """Two top-level `rid`s could be read differently here and on the engine, and an abort would miss."""

    def names_rid_twice(pairs: list[tuple[str, Any]]) -> int:
        return sum(name == "rid" for name, _ in pairs)

    if json.loads(body, object_pairs_hook=names_rid_twice) > 1:  # the outermost object is counted last
        raise InvalidRequest("The body names `rid` twice.", remedy="Name it once.")


def _check_rid(rid: object) -> None:
    """SGLang aborts every request whose id begins with the given one, so a short id would end others' requests."""
    named = rid if isinstance(rid, list) else [rid]
    if not named or not all(isinstance(one, str) and len(one) >= SHORTEST_RID for one in named):
        raise InvalidRequest(
            f"`rid` is not a string, or a list of strings, of at least {SHORTEST_RID} characters.",
            remedy="Leave it out, or use a UUID.",
        )


def _rids(rid: Any, found: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids the engine gives the requests of this body (SGLang appends `_<index>` to a batch's single `rid`)."""
    if isinstance(rid, list):
        return tuple(rid)
    text, ids = found.get("text"), found.get("input_ids")
    if isinstance(text, list):
        return tuple(f"{rid}_{index}" for index in range(len(text)))
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return tuple(f"{rid}_{index}" for index in range(len(ids)))
    return (rid,)


def wants_input_logprobs(found: Mapping[str, Any]) -> bool:
    """Whether this native body may get log probabilities of its prompts' tokens; a batch has lists of both fields."""
    asked, starts = as_list(found.get("return_logprob")), as_list(found.get("logprob_start_len"))
    return any(one is True for one in asked) and any(type(start) is int and start >= 0 for start in starts)


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
