"""GET /openapi.json: the routes that this router serves, the fields of their bodies, and the
errors, as OpenAPI 3.1.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from shell_router import __version__
from shell_router.api.chat import INERT
from shell_router.api.conversation import MAX_TOOLS, ROLES
from shell_router.api.embeddings import MAX_TEXTS
from shell_router.api.engine_chat import MAX_CHOICES, MAX_TOP_LOGPROBS
from shell_router.api.fields import FLAGS, INTEGERS, MAX_TOKENS, NUMBERS
from shell_router.api.messages import INERT as INERT_MESSAGE
from shell_router.api.messages import SAME as SAME_MESSAGE
from shell_router.api.replies import (
    INTERNAL,
    PROBLEMS,
    REJECTED_BY_ENGINE,
    ErrorBody,
    json_reply,
)
from shell_router.api.responses import INERT as INERT_RESPONSE
from shell_router.api.responses import SAME
from shell_router.engines.native_body import GENERATE_FIELDS
from shell_router.http.app import Request, Response, Route

Schema = Mapping[str, Any]
Body = Mapping[str, Schema]

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
OBJECT = {"type": "object"}
ANY = dict[str, Any]()
NO_EFFECT = {"description": "Accepted without effect."}


def _list(items: Schema, **limits: Any) -> Schema:
    return {"type": "array", "items": items, **limits}


def _either(*kinds: Schema) -> Schema:
    return {"anyOf": list(kinds)}


def _number(low: float, high: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def _all(schema: Schema, names: str) -> Body:
    return dict.fromkeys(names.split(), schema)


NAMES = _either(TEXT, _list(TEXT, uniqueItems=True))
TEXT_OR_OBJECT = _either(TEXT, OBJECT)
ERROR_TYPES: Mapping[Any, Schema] = {
    str: TEXT,
    str | None: _either(TEXT, {"type": "null"}),
    bool: FLAG,
}
TOOLS = _list(OBJECT, maxItems=MAX_TOOLS)
OBJECTS = _list(OBJECT, minItems=1)
LIMIT = _number(1, MAX_TOKENS)
MESSAGE = {
    "role": {"enum": [*ROLES]},
    "content": _either(TEXT, _list(OBJECT), {"type": "null"}),
    "tool_calls": TOOLS,
    **_all(TEXT, "tool_call_id reasoning_content"),
}
SAMPLING: Body = {
    **{name: _number(low, high, "number") for name, (low, high) in NUMBERS.items()},
    **{name: _number(low, high) for name, (_, low, high) in INTEGERS.items()},
    **dict.fromkeys(FLAGS, FLAG),
    "stop": _either(TEXT, _list(TEXT)),
    "stop_token_ids": _list({"type": "integer", "minimum": 0}),
    **_all(TEXT, "regex ebnf"),
    "json_schema": TEXT_OR_OBJECT,
    "response_format": OBJECT,
}
ENGINES_OWN: Body = {
    "n": _number(1, MAX_CHOICES),
    "logit_bias": OBJECT,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
}
CHAT: Body = {
    **_all(NAMES, "model models"),
    "messages": _list({"type": "object", "required": ["role"], "properties": MESSAGE}, minItems=1),
    **SAMPLING,
    **ENGINES_OWN,
    **dict.fromkeys(sorted(INERT), NO_EFFECT),
    **_all(FLAG, "stream parallel_tool_calls logprobs separate_reasoning include_agents lazy"),
    **_all(TEXT, "criteria program prompt_cache_key user"),
    **_all(OBJECT, "chat_template_kwargs prediction topology fusion prefill"),
    "tools": TOOLS,
    "tool_choice": _either({"enum": ["none", "auto", "required"]}, OBJECT),
    "top_logprobs": _number(0, MAX_TOP_LOGPROBS),
    "reasoning_effort": ANY,
    "max_thinking_tokens": LIMIT,
    "metadata": {"type": "object", "additionalProperties": TEXT},
    "judge": _either(TEXT, _list(TEXT), OBJECT),
    "quorum": {"type": "integer", "minimum": 1},
    "grace_s": _number(0, 86_400, "number"),
    "plugins": _list(OBJECT),
}
NATIVE: Body = {**dict.fromkeys(sorted(GENERATE_FIELDS), ANY), "stream": FLAG, "model": TEXT}
BODIES: Mapping[str, Body] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": {
        "model": TEXT,
        "prompt": _either(TEXT, _list(ANY)),
        "stream": FLAG,
        **{name: schema for name, schema in SAMPLING.items() if name != "max_completion_tokens"},
        **ENGINES_OWN,
        "logprobs": _number(0, MAX_TOP_LOGPROBS),
        **_all(TEXT, "prompt_cache_key user"),
    },
    "POST /v1/responses": {
        **{name: CHAT[name] for name in CHAT if name in SAME},
        "input": _either(TEXT, OBJECTS),
        "instructions": TEXT,
        "max_output_tokens": LIMIT,
        "tools": TOOLS,
        "tool_choice": CHAT["tool_choice"],
        **_all(OBJECT, "text reasoning"),
        "truncation": {"enum": ["disabled"]},
        "background": FLAG,
        **dict.fromkeys(sorted({*INERT_RESPONSE, "store"}), NO_EFFECT),
    },
    "POST /v1/messages": {
        **{name: CHAT[name] for name in CHAT if name in SAME_MESSAGE},
        "messages": OBJECTS,
        "max_tokens": LIMIT,
        "system": _either(TEXT, _list(OBJECT)),
        "stop_sequences": _list(TEXT),
        "tools": TOOLS,
        **_all(OBJECT, "tool_choice thinking output_config metadata"),
        **dict.fromkeys(sorted(INERT_MESSAGE), NO_EFFECT),
    },
    "POST /v1/embeddings": {
        "model": TEXT,
        "input": _either(TEXT, _list(TEXT, minItems=1, maxItems=MAX_TEXTS)),
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": {"type": "integer"},
        "user": NO_EFFECT,
    },
    "POST /v1/agent/requests": {
        **_all(TEXT, "program agent"),
        "model": NAMES,
        "prompt": _either(TEXT, _list(TEXT_OR_OBJECT)),
        "messages": _list(OBJECT),
        **_all(OBJECT, "chat_template_kwargs sampling_params"),
        **SAMPLING,
        "stream": FLAG,
        "wait_s": {"type": "number", "minimum": 0},
        "timeout_s": {"type": "number", "exclusiveMinimum": 0},
        "prefill": {"type": "object", "properties": {"incremental": FLAG, "chunk_tokens": ANY}},
    },
    "POST /generate": NATIVE,
    "POST /prefill_only": NATIVE,
    "PUT /v1/topologies/{name}": {"name": TEXT},
    "POST /v1/engines": {"model": TEXT, "pair": OBJECT},
    "POST /v1/batches": {
        **_all(TEXT, "input_file_id endpoint completion_window"),
        "metadata": OBJECT,
    },
}
"""The fields of JSON bodies. What is not in them has no effect, or is forwarded: the reference says
which.
"""
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "POST /v1/chat/completions": ("messages",),
    "POST /v1/completions": ("model", "prompt"),
    "POST /v1/responses": ("input",),
    "POST /v1/messages": ("messages", "max_tokens"),
    "POST /v1/embeddings": ("model", "input"),
    "POST /v1/agent/requests": ("program", "agent", "model"),
    "POST /v1/engines": ("model", "pair"),
    "POST /v1/batches": ("input_file_id", "endpoint", "completion_window"),
}
OTHER_BODIES = {
    "POST /v1/files": (
        "multipart/form-data",
        {"type": "object", "properties": {"purpose": TEXT, "file": TEXT}},
    ),
    "PUT /v1/agent/outputs/{program}/{agent}": ("text/plain", TEXT),
}
TEXT_ANSWERS = {
    "GET /metrics": "text/plain",
    "GET /v1/files/{file_id}/content": "application/jsonl",
}
QUERIES = {
    "GET /v1/responses/{response_id}": ("stream", "starting_after"),
    "GET /v1/agent/outputs/{marker}": ("wait_s",),
    "DELETE /v1/engines": ("model", "prefill", "decode", "wait_s"),
    "GET /metrics": ("name[]",),
    "GET /v1/traces": ("model", "status", "since", "limit"),
    "GET /v1/files": ("purpose", "order", "limit", "after"),
    "GET /v1/batches": ("limit", "after"),
}


def document(routes: Iterable[Route]) -> Mapping[str, Any]:
    """The description of `routes`; the sentence about each is its handler's own."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(f"{route.method} {route.path}", route.handler)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    codes = sorted({problem.code for problem in (*PROBLEMS.values(), REJECTED_BY_ENGINE, INTERNAL)})
    types = get_type_hints(ErrorBody)
    error = {name: ERROR_TYPES[of] for name, of in types.items()} | {"code": {"enum": codes}}
    envelope = {"type": "object", "properties": {"error": {"type": "object", "properties": error}}}
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "shell-router", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": envelope},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}, "x-api-key": header},
        },
        "security": [{"key": []}, {"x-api-key": []}, {}],
    }


def _operation(name: str, handler: Any) -> dict[str, Any]:
    placed = [
        {"name": one, "in": "path", "required": True, "schema": TEXT}
        for one in re.findall(r"{(\w+)}", name)
    ]
    asked = [{"name": one, "in": "query", "schema": TEXT} for one in QUERIES.get(name, ())]
    text = TEXT_ANSWERS.get(name)
    body = BODIES.get(name)
    content = {text or "application/json": {"schema": TEXT if text else OBJECT}}
    if body is not None and "stream" in body:
        content["text/event-stream"] = {"schema": TEXT}
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "operationId": handler.__name__,
        "summary": re.sub(r"^[A-Z]+( \S+)?: ", "", (handler.__doc__ or "").partition("\n")[0]),
        "parameters": placed + asked,
        "responses": {
            "2XX": {"description": "Done.", "content": content},
            "default": {"description": "An error."},
        },
    }
    operation["responses"]["default"]["content"] = failed
    kind, schema = OTHER_BODIES.get(name, ("application/json", None))
    if body is not None:
        schema = {"type": "object", "properties": body, "required": [*REQUIRED.get(name, ())]}
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    return operation


async def show(request: Request) -> Response:
    """This document."""
    return json_reply(request, document(request.app.routes))
