"""GET /openapi.json: the served routes, their bodies and the errors, as OpenAPI 3.1."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from shell_router import __version__
from shell_router.api.agents import AGENT
from shell_router.api.embeddings import EMBEDDINGS
from shell_router.api.engine_chat import COMPLETION
from shell_router.api.fields import CHAT
from shell_router.api.messages import MESSAGES
from shell_router.api.native import NATIVE
from shell_router.api.replies import INTERNAL, PROBLEMS, REJECTED_BY_ENGINE, ErrorBody, json_reply
from shell_router.api.response_translation import RESPONSE
from shell_router.api.views import ENGINES, TOPOLOGY
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.validation import JsonObject
from shell_router.http.app import Key, Request, Response, Route

TEXT = {"type": "string"}
OBJECT = {"type": "object"}

ROUTER_BODIES: Mapping[str, JsonObject[Any]] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": COMPLETION,
    "POST /v1/responses": RESPONSE,
    "POST /v1/responses/input_tokens": RESPONSE,
    "POST /v1/messages": MESSAGES,
    "POST /v1/messages/count_tokens": MESSAGES,
    "POST /v1/embeddings": EMBEDDINGS,
    "POST /v1/agent/requests": AGENT,
    "POST /generate": NATIVE,
    "POST /prefill_only": NATIVE,
    "PUT /v1/topologies/{name}": TOPOLOGY,
    "POST /v1/engines": ENGINES,
}
BODIES = Key[dict[str, JsonObject[Any]]]("BODIES")
"""The JSON bodies of an application's routes; wings add theirs."""
OTHER_BODIES: Mapping[str, tuple[str, Values]] = {
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
    "DELETE /v1/engines": ("model", "prefill", "decode", "server", "wait_s"),
    "GET /metrics": ("name[]",),
    "GET /v1/traces": ("model", "status", "since", "limit"),
    "GET /v1/files": ("purpose", "order", "limit", "after"),
    "GET /v1/batches": ("limit", "after"),
}
REFERENCES = "#/components/schemas/{model}"


def document(routes: Iterable[Route], bodies: Mapping[str, JsonObject[Any]]) -> Values:
    """Return the description of `routes`; the sentence about each is its handler's own."""
    adapters: list[Any] = [(name, "validation", body.adapter) for name, body in bodies.items()]
    adapters.append(("error", "validation", TypeAdapter(ErrorBody)))
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template=REFERENCES)
    components = definitions["$defs"]
    codes = {problem.code for problem in (*PROBLEMS.values(), REJECTED_BY_ENGINE, INTERNAL)}
    components["ErrorBody"]["properties"]["code"] = {"enum": sorted(codes)}
    del components["ErrorBody"]["required"]  # Anthropic's errors have fewer fields
    components["Error"] = {
        "type": "object",
        "properties": {"error": schemas["error", "validation"]},
    }
    paths: dict[str, NewValues] = {}
    for route in routes:
        name = f"{route.method} {route.path}"
        operation = _operation(name, route.handler)
        if name in bodies:
            _add_body(operation, "application/json", schemas[name, "validation"])
            if "stream" in bodies[name].names:
                operation["responses"]["2XX"]["content"]["text/event-stream"] = {}
        elif name in OTHER_BODIES:
            _add_body(operation, *OTHER_BODIES[name])
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "shell-router", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}, "x-api-key": header},
        },
        "security": [{"key": []}, {"x-api-key": []}, {}],
    }


def _add_body(operation: NewValues, kind: str, schema: Values) -> None:
    operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}


def _operation(name: str, handler: Any) -> NewValues:
    """Return the operation of a route by its handler, but for its body."""
    in_path = [
        {"name": parameter, "in": "path", "required": True, "schema": TEXT}
        for parameter in re.findall(r"{(\w+)}", name)
    ]
    in_query = [
        {"name": parameter, "in": "query", "schema": TEXT} for parameter in QUERIES.get(name, ())
    ]
    text = TEXT_ANSWERS.get(name)
    content = {text: {"schema": TEXT}} if text else {"application/json": {"schema": OBJECT}}
    failed = {"application/json": {"schema": {"$ref": REFERENCES.format(model="Error")}}}
    return {
        "operationId": handler.__name__,
        "summary": (handler.__doc__ or "").partition("\n")[0],
        "parameters": in_path + in_query,
        "responses": {
            "2XX": {"description": "Done.", "content": content},
            "default": {"description": "An error.", "content": failed},
        },
    }


async def show(request: Request) -> Response:
    """Describe the routes, as OpenAPI 3.1."""
    bodies = request.app[BODIES]
    return json_reply(request, document(request.app.routes, bodies))
