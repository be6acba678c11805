"""Routes that show models, traces, health, metrics and the page, or change what is served."""

import asyncio
import logging
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from importlib.resources import files
from typing import NotRequired

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from typing_extensions import TypedDict

from shell_router.api.admission import permit
from shell_router.api.bodies import query_number, read_body, read_object
from shell_router.api.live import TARGETS
from shell_router.api.replies import json_reply, note_ignored, whole_reply
from shell_router.api.services import (
    ENGINE_CHECK,
    KEY,
    SERVICES,
    SETTINGS,
    STARTED_AT,
    TENANT,
    ReadinessCheck,
    Services,
)
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.sampling import check_depth
from shell_router.core.validation import (
    JsonObject,
    Name,
    field_error,
    parse_object,
    require_distinct,
)
from shell_router.errors import InvalidField, InvalidRequest, TopologyError, hide_user
from shell_router.files.document import read_document
from shell_router.http.app import App, Key, Request, Response, Route
from shell_router.routing.holdout import Holdouts, Optimization
from shell_router.telemetry import Trace
from shell_router.telemetry.trace import OUTCOMES
from shell_router.topology import AUTO, Conditional, Graph

log = logging.getLogger(__name__)


class TopologyBody(TypedDict, total=False):
    """A topology's document, as a topology file has it."""

    name: str


class EnginesBody(TypedDict):
    """A further pair of a model, as in the settings, or the URL of a further undivided server."""

    model: Name
    pair: NotRequired[NewValues]
    server: NotRequired[str]


class EnginesQuery(TypedDict):
    """The model of servers; further parameters are their addresses by role."""

    model: Name


TOPOLOGY = JsonObject(TopologyBody)
ENGINES = JsonObject(EnginesBody)
ENGINES_QUERY = JsonObject(EnginesQuery)


async def list_models(request: Request) -> Response:
    """List topologies, models and embedders as OpenAI's model objects."""
    services = request.app[SERVICES]
    serving = services.serving()
    names = dict.fromkeys((*request.app[TARGETS].names, *services.embedders))
    allowed = request[KEY].models
    data = [
        _describe_target(request, name, serving) for name in names if not allowed or name in allowed
    ]
    return json_reply(request, {"object": "list", "data": data})


async def show_model(request: Request) -> Response:
    """Show one topology or model."""
    name = request.match["model"]
    permit(request, (name,))
    services = request.app[SERVICES]
    graph = None if name in services.embedders else request.app[TARGETS].find(name)
    facts = _describe_target(request, name, services.serving())
    if graph is None:
        return json_reply(request, facts)
    agents = {
        agent.id: {"model": agent.model_name, "precursors": graph.waits_for[agent.id]}
        for agent in graph.agents.values()
    }
    return json_reply(request, {**facts, "graph": agents})


def _describe_target(request: Request, name: str, serving: Mapping[str, bool]) -> NewValues:
    """Return what a request may name as OpenAI's model object.

    `serving` says which models' engines seem to serve.
    """
    services = request.app[SERVICES]
    created = request.app[STARTED_AT]
    facts = {"id": name, "object": "model", "created": created, "owned_by": "shell-router"}
    topology = services.topologies.get(name)
    if name == AUTO:
        description = "one of the models, chosen for each request"
        return {**facts, "kind": AUTO, "description": description}
    if topology is not None:
        return {**facts, "kind": "topology", **_describe_topology(services, name, topology)}
    if name in services.models:
        return {**facts, "kind": "model", **_describe_model(services, name, serving)}
    return {**facts, "kind": "embedder"}


def _describe_model(services: Services, name: str, serving: Mapping[str, bool]) -> NewValues:
    model = services.models[name]
    served_by = model.base or name
    optional = {
        "engine": services.engines.get(served_by),
        "parent": model.base,
        "ready": serving.get(served_by),
    }
    comparisons = _list_comparisons(services.holdouts, "drafts")
    return {
        "max_model_len": model.context_length,
        **{key: fact for key, fact in optional.items() if fact is not None},
        "drafts": [each for each in comparisons if each["models"] == name],
    }


def _describe_topology(services: Services, name: str, topology: Graph) -> NewValues:
    steps = {}
    names = {name}
    if isinstance(topology, Conditional):
        steps = {"steps": list(topology.steps)}
        names = {step.topology.name for step in topology.steps.values()}
    comparisons = _list_comparisons(services.holdouts, "incremental_prefill")
    lengths = [
        services.models[agent.model].context_length
        for agent in topology.agents.values()
        if agent.model in services.models
    ]
    return {
        **({"max_model_len": min(lengths)} if lengths else {}),
        "source": services.topologies.catalog.entries[name].source,
        "description": topology.description,
        "agents": len(topology.agents),
        **steps,
        "incremental_prefill": [each for each in comparisons if each["topology"] in names],
    }


def _list_comparisons(holdouts: Holdouts, optimization: Optimization) -> list[NewValues]:
    return [
        {
            "topology": comparison.compared.topology,
            "models": comparison.compared.models,
            **({"role": comparison.compared.role} if comparison.compared.role else {}),
            "state": comparison.state,
            "benefit": comparison.benefit and asdict(comparison.benefit),
        }
        for comparison in holdouts.comparisons()
        if comparison.compared.optimization == optimization
    ]


async def list_topologies(request: Request) -> Response:
    """List the topologies, and where each comes from."""
    entries = request.app[SERVICES].topologies.readable().entries
    allowed = request[KEY].models
    listed = [
        {
            "name": name,
            "source": entry.source,
            "description": entry.graph.description,
            "agents": len(entry.graph.agents),
        }
        for name, entry in sorted(entries.items())
        if not allowed or name in allowed
    ]
    return json_reply(request, {"object": "list", "data": listed})


async def show_topology(request: Request) -> Response:
    """Show the document of a topology."""
    permit(request, (request.match["name"],))
    entry = request.app[SERVICES].topologies.readable().entry(request.match["name"])
    return json_reply(request, entry.document.value)


async def put_topology(request: Request) -> Response:
    """Serve a topology under a name; it replaces the one that was put before.

    The body is its document, as JSON or as a topology file's YAML.
    """
    body = await read_body(request)
    name = request.match["name"]
    if request.content_type.endswith("yaml"):
        document = await asyncio.to_thread(_from_yaml, body, f"{name}.yaml")
    else:
        document = parse_object(body)
        check_depth(document, "")
        require_distinct(body)
    is_new = await request.app[SERVICES].topologies.put(name, document)
    log.info("topology %s was put by %s", name, request[TENANT])
    return json_reply(request, {"name": name, "source": "put"}, status=201 if is_new else 200)


def _from_yaml(body: bytes, source: str) -> Values:
    try:
        document = read_document(body.decode(), source=source).value
    except (UnicodeDecodeError, TopologyError) as error:
        raise InvalidRequest(str(error)) from None
    if not isinstance(document, dict):
        raise InvalidRequest(
            "The topology is not a mapping.", remedy="Write keys and values, as in a topology file."
        )
    return document


async def delete_topology(request: Request) -> Response:
    """Stop serving a topology that was put."""
    name = request.match["name"]
    services = request.app[SERVICES]
    await services.topologies.delete(name)
    services.metrics.drop_target(name)
    log.info("topology %s was deleted by %s", name, request[TENANT])
    return json_reply(request, {"name": name, "deleted": True})


async def list_engines(request: Request) -> Response:
    """List the engines of all models."""
    engines = list(request.app[SERVICES].fleet.listed())
    return json_reply(request, {"object": "list", "data": engines})


async def add_engines(request: Request) -> Response:
    """Serve a model by one more pair or server, which is up and is probed first."""
    sent = await read_object(request)
    body = ENGINES.read(sent)
    warnings = note_ignored(request, ENGINES.find_unknown(sent))
    model = body["model"]
    fields = body.get("pair") or {name: body[name] for name in ("server",) if name in body}
    added = {**fields, **await request.app[SERVICES].fleet.add(model, fields)}
    log.info("%s added to model %s the engines %s", request[TENANT], model, added)
    return json_reply(request, {"model": model, **added, **warnings}, status=201)


async def drain_engines(request: Request) -> Response:
    """Drain a pair or a server: send no more requests, and wait for the running ones.

    The status is 202 if some still run after `wait_s`.
    """
    fleet = request.app[SERVICES].fleet
    query = dict(request.query)
    model = ENGINES_QUERY.read(query)["model"]
    urls = {}
    for role in fleet.roles(model):
        if role not in query:
            raise field_error(role, "is missing", "GET /v1/engines lists all.")
        urls[role] = query[role]
    limit_s = request.app[SETTINGS].request_timeout_s
    wait_s = query_number(request.query, "wait_s", limit_s, limit_s)
    log.info("%s drains of model %s the engines %s", request[TENANT], model, hide_user(str(urls)))
    running = await fleet.drain(model, urls, wait_s)
    body = {"model": model, **urls, "running": running}
    return json_reply(request, body, status=202 if running else 200)


TRACE_FILTERS = ("model", "status", "since", "limit")
MOST_TRACES = 1000


async def list_traces(request: Request) -> Response:
    """List the tenant's latest requests, the last first.

    `model`, `status`, `since` (Unix seconds) and `limit` choose among them.
    """
    query = request.query
    if unknown := [name for name in query if name not in TRACE_FILTERS]:
        raise InvalidField(
            f"{unknown[0]} is no filter of traces; take {', '.join(TRACE_FILTERS)}.",
            field=unknown[0],
        )
    model = query.get("model")
    status = query.get("status")
    if status not in (None, *OUTCOMES):
        raise InvalidField(f"status must be one of {', '.join(OUTCOMES)}.", field="status")
    since = query_number(query, "since", 0.0, 1e12)
    limit = query_number(query, "limit", 20.0, MOST_TRACES)

    def wanted(trace: Trace) -> bool:
        return (
            model in (None, trace.target)
            and status in (None, trace.outcome)
            and trace.wall_s >= since
        )

    traces = request.app[SERVICES].traces.latest(request[TENANT], wanted, int(limit))
    return json_reply(request, {"object": "list", "data": [trace.summary() for trace in traces]})


async def show_trace(request: Request) -> Response:
    """Show the trace of one of the tenant's own requests."""
    trace = request.app[SERVICES].traces.get(request[TENANT], request.match["trace_id"])
    return json_reply(request, trace.as_json())


async def health(request: Request) -> Response:
    """Answer: the process lives."""
    return json_reply(request, {"status": "ok"})


async def ready(request: Request) -> Response:
    """Say whether the engines of some model can serve; 503 names those that cannot.

    Other models' engines, and a shared cache that is away, only show as degraded. A router that is
    about to stop is not ready.
    """
    services = request.app[SERVICES]
    limit_s = request.app[SETTINGS].ready_timeout_s
    checks = [_holds(name, check, limit_s) for name, check in services.checks.items()]
    holding = dict(zip(services.checks, await asyncio.gather(*checks), strict=True))
    engines = {name for name in holding if name.startswith(ENGINE_CHECK)}
    optional = set(services.optional_checks)
    if any(holding[name] for name in engines):
        optional |= engines
    away = [name for name, holds in holding.items() if not holds]
    failing = [name for name in away if name not in optional]
    if request.app.leaving.is_set():
        failing.append("stopping")
    degraded = [name for name in away if name in optional]
    body = {"ready": not failing, "not_ready": failing, "degraded": degraded, "checks": holding}
    return json_reply(request, body, status=503 if failing else 200)


async def metrics(request: Request) -> Response:
    """Write the metrics, or those that `name[]` names, in Prometheus's text format."""
    registry = request.app[SERVICES].metrics.registry
    names = request.query.getall("name[]", ())
    body = generate_latest(registry.restricted_registry(names) if names else registry)
    return whole_reply(request, body, 200, CONTENT_TYPE_LATEST)


async def _holds(name: str, check: ReadinessCheck, limit_s: float) -> bool:
    """Return whether the check holds; the log says why one fails or takes too long."""
    try:
        async with asyncio.timeout(limit_s):
            return await check()
    except Exception as error:
        log.warning("readiness check of %s failed: %s: %s", name, type(error).__name__, error)
        return False


PAGE = Key[str]("PAGE")


def add_page(app: App) -> None:
    """Serve the live page, `GET /ui`, which asks the API with its caller's own key."""
    app[PAGE] = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    app.routes += PAGE_ROUTES


async def show_root(request: Request) -> Response:
    """Send a browser that opens the router's address to the page, if it is served."""
    if PAGE not in request.app:
        return await health(request)
    return whole_reply(request, b"", 307, "text/plain", {"Location": "/ui"})


async def show_page(request: Request) -> Response:
    """Send the page, which may run its own script and connect to this router alone."""
    page = request.app[PAGE]
    headers = {"Content-Security-Policy": policy(page), "X-Content-Type-Options": "nosniff"}
    return whole_reply(request, page.encode(), 200, "text/html; charset=utf-8", headers)


def policy(page: str) -> str:
    """Return the content security policy of a page with one script and one style inside."""

    def hashed(tag: str) -> str:
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; "
        "connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    )


PAGE_ROUTES = (Route("GET", "/ui", show_page),)
