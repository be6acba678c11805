"""Before every route: request ids, API keys, the limit on running requests, errors, and the end of
the server.

Without keys only callers of this machine are served, who may do everything.
"""

import asyncio
import functools
import ipaddress
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from aiohttp import ClientConnectionResetError, web

from shell_router.api.plain import Connections, Handler, PlainRequest, Reply, Request
from shell_router.api.replies import INTERNAL, problem_of, problem_reply
from shell_router.api.services import (
    AGENTS,
    ASKED,
    KEY,
    REQUEST_ID,
    TENANT,
    TOKENS,
    TRACE,
    ApiSettings,
    Services,
)
from shell_router.config import ApiKey
from shell_router.core.spans import CURRENT, span_of_client
from shell_router.errors import (
    ConfigError,
    Forbidden,
    InvalidRequest,
    Overloaded,
    RemoteRefused,
    RouterStopping,
    Unauthorized,
    UnsupportedMediaType,
)
from shell_router.moa.requests import Deadline

log = logging.getLogger(__name__)

LOCAL = ApiKey(key="", tenant="local", operator=True)
"""What callers of this machine may do where no keys are set."""


class Keys:
    """The keys that count now; `take` puts others in their place while requests run. Raises
    ConfigError.
    """

    def __init__(self, keys: Mapping[str, str | ApiKey]) -> None:
        self.take(keys)

    def take(self, keys: Mapping[str, str | ApiKey]) -> None:
        """From now on these keys, by their names, are known and no others; on a ConfigError those
        before stay.
        """
        found: dict[bytes, ApiKey] = {}
        for name, given in keys.items():
            if isinstance(given, str):
                key = ApiKey(key=given)
            else:
                key = given
            if not name or not key.key:
                raise ConfigError("keys must have a name and a secret each.", remedy="Write both.")
            other = found.setdefault(
                sha256(key.key.encode()).digest(), key := replace(key, tenant=key.tenant or name)
            )
            if other is not key:
                raise ConfigError(
                    f"the keys of {other.tenant!r} and {name!r} are the same.",
                    remedy="Give each its own secret.",
                )
        self._by_digest = found
        self.several = len({key.tenant for key in found.values() if not key.operator}) > 1
        """Whether there are several tenants; operators are none."""

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    def caller(self, authorization: str, peer: str | None, wall: Callable[[], float]) -> ApiKey:
        """The caller's key, or LOCAL where no keys are set. Raises Unauthorized.

        `peer` is its address; None for a Unix socket, which only this machine reaches. `wall` gives
        Unix time.
        """
        if not self._by_digest:
            if peer is not None and not _is_loopback(peer):
                raise RemoteRefused(
                    (
                        "No API keys are set, so only callers on this machine are served, and "
                        f"{peer} is not."
                    ),
                    remedy=(
                        "Add api_keys to the configuration and send one as 'Authorization: "
                        "Bearer <key>'."
                    ),
                )
            return LOCAL
        scheme, _, secret = authorization.partition(" ")
        # looked up by digest, so that timing says nothing of any key; surrogates as aiohttp has
        # read them
        key = self._by_digest.get(
            sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        )
        if scheme.lower() != "bearer" or key is None:
            raise Unauthorized(
                "The API key is missing or wrong.",
                remedy="Send a valid one as 'Authorization: Bearer <key>'.",
            )
        if key.expires is not None and key.expires_s <= wall():
            raise Unauthorized(
                f"The API key expired at {key.expires}.", remedy="Ask the operator for a new one."
            )
        return key


def require_route(key: ApiKey, method: str, path: str, route: str) -> None:
    """Raise Forbidden where the key is not for `path`, or the route, named by its pattern, is the
    operator's.
    """
    if key.routes and not any(
        path == one or path.startswith(f"{one.rstrip('/')}/") for one in key.routes
    ):
        raise Forbidden(
            f"The API key is not for {path[:200]}.", remedy=f"It is for: {', '.join(key.routes)}."
        )
    if not key.operator and (
        route in OPERATORS or (route in ADMINISTRATION and method not in ("GET", "HEAD"))
    ):
        raise Forbidden(
            f"{method} {route} is for operators.",
            remedy="Use a key that has `operator: on` in the configuration.",
        )


OPERATORS = frozenset({"/metrics", "/v1/engines"})
ADMINISTRATION = frozenset({"/v1/topologies/{name}"})
"""Routes that change what all tenants are served."""


def permit(request: Request, models: Collection[str], asked: str = "") -> None:
    """Note what the request asks, by default these; raise Forbidden unless its key may use all of
    these models.
    """
    allowed = request[KEY].models
    request[ASKED] = (asked or ",".join(models))[:200]
    if allowed and not set(models) <= set(allowed):
        raise Forbidden(
            "The API key is not for all of the models.", remedy=f"It is for: {', '.join(allowed)}."
        )


@functools.lru_cache(maxsize=1024)
def require_local(host: str, origin: str | None, kind: str = "") -> None:
    """Raise RemoteRefused for what a browser of this machine sends for a page from elsewhere.

    Such a page may have its own name resolved to this machine, and may post bodies of the types
    that need no
    permission: UnsupportedMediaType where `kind`, the Content-Type, is one of them.
    """
    for what, given, form in (("Host", host or "127.0.0.1", _HOST), ("Origin", origin, _ORIGIN)):
        if given is None:
            found = None
        else:
            found = form.fullmatch(given)
        if given is not None and not (found and _names_this_machine(found[1].strip("[]").lower())):
            raise RemoteRefused(
                (
                    f"No API keys are set, so only this machine is served, and the header {what} "
                    "names another."
                ),
                remedy="Ask 127.0.0.1 or localhost, or add api_keys to the configuration.",
            )
    if (kind := kind.partition(";")[0].strip().lower()) in _FORMS:
        raise UnsupportedMediaType(
            f"The body has the Content-Type {kind}, as pages of other sites can send it.",
            remedy=(
                "Send it with -H 'Content-Type: application/json', or add api_keys to the "
                "configuration."
            ),
        )


_FORMS = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
"""Fetch's "CORS-safelisted" types. https://fetch.spec.whatwg.org/#cors-safelisted-request-header"""

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]+)?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + _HOST.pattern, re.ASCII)


def _names_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return _is_loopback(name)
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)
def _is_loopback(peer: str) -> bool:
    address = ipaddress.ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


FAREWELL_S = 5.0
"""The time that cut requests get to send their clients the error."""


class Drain:
    """The running requests of one app. A stop of the server waits for them, and cuts those that
    take too long.
    """

    def __init__(self) -> None:
        self.running = 0
        self.cut = False
        self.deadlines: set[Deadline] = set()
        self._idle = asyncio.Event()

    def ended(self) -> None:
        """One of them has ended."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    def deadline(self, limit_s: float | None = None) -> "Deadline":
        """Work that may take long goes inside.

        Raises TimeoutError after `limit_s`, and RouterStopping if the server ends first.
        """
        if self.cut:
            raise _stopping()
        return Deadline(limit_s, self.deadlines)

    async def finish(self, limit_s: float, force_shutdown: asyncio.Event) -> None:
        """Return when no request runs; cut those that still run after `limit_s`, or once
        `force_shutdown` is set.
        """
        if self.running:
            await self._until_idle(limit_s, force_shutdown)
        if self.running:
            log.warning("%d requests still run and are cut", self.running)
            self.cut = True
            for deadline in self.deadlines:
                deadline.end(_stopping())
            await self._until_idle(FAREWELL_S, asyncio.Event())

    async def _until_idle(self, limit_s: float, force_shutdown: asyncio.Event) -> None:
        self._idle.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, force_shutdown)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _stopping() -> RouterStopping:
    return RouterStopping(
        "The router stopped before this request had ended.",
        remedy="Send it again, to another router or once this one is back.",
    )


DRAIN = web.AppKey("DRAIN", Drain)


OPEN_ROUTES = frozenset(
    {"/health", "/ready", "/ui"}
)  # probes carry no key; the page is static, and sends one
FREEING = frozenset({"/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/cancel"})
"""Routes that make space, and are never refused for lack of it."""
CLIENT_GONE = 499  # nginx's number for it; no client ever sees it
ACCEPTED_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
DETACHED: web.RequestKey["asyncio.Task[Any]"] = web.RequestKey("DETACHED")
"""What goes on after the request."""


class Admission:
    """Stands before every route of one app and limits its running requests."""

    def __init__(self, services: Services, settings: ApiSettings, drain: Drain) -> None:
        self._services = services
        self._settings = settings
        self._drain = drain
        self._agents: Counter[str] = Counter()
        self._detached: set[asyncio.Task[Any]] = set()
        self.keys = Keys(settings.keys)
        self.connections = Connections(settings)
        services.metrics.running_requests.set_function(lambda: drain.running)

    @web.middleware
    async def serve(self, request: Request, handler: Handler) -> Reply:
        """Answer `request` by its route, or with the error that its route raised."""
        services = self._services
        drain = self._drain
        started_s = self._services.clock()
        route = _route(request)
        by_aiohttp = None if isinstance(request, PlainRequest) else request
        given = request.headers.get(
            "x-request-id", ""
        )  # the client's own, if it is fit to be written to the log
        CURRENT.set(span_of_client(request.headers) if "traceparent" in request.headers else None)
        request[REQUEST_ID] = given if ACCEPTED_REQUEST_ID.fullmatch(given) else services.new_id()
        status = CLIENT_GONE
        if by_aiohttp is not None:
            self.connections.busy(by_aiohttp.transport)
        try:
            key = request[KEY] = self._key(request)
            request[TENANT] = key.tenant or ""
            if key is not LOCAL:
                require_route(key, request.method, request.path, route)
            if request.headers.get("content-encoding", "identity").lower() != "identity":
                raise InvalidRequest(
                    "The body is compressed, and the router unpacks none.",
                    remedy="Send it as it is.",
                )
            if request.method in ("POST", "PUT") and route not in FREEING:
                self._require_tokens(key.tokens_per_minute, request[TENANT])
                if drain.running >= self._settings.max_running:
                    raise Overloaded(
                        f"{drain.running} requests are running, which is this server's limit.",
                        remedy=(
                            f"Try again in {self._settings.retry_after_s} s, or raise max_running."
                        ),
                    )
                self.count(request, 1)
            reply = await handler(request)
            status = reply.status
            return reply
        except asyncio.CancelledError:
            raise
        except ClientConnectionResetError:
            return web.Response(status=CLIENT_GONE)  # raised, aiohttp would log it as an error
        except Exception as error:
            problem = self.problem_reply(request, error)
            status = problem.status
            return problem
        finally:
            if by_aiohttp is not None:
                self.connections.idle(by_aiohttp.transport)
            if AGENTS in request:
                ended = functools.partial(self._ended, request[TENANT], request[AGENTS])
                request[DETACHED].add_done_callback(ended) if DETACHED in request else ended()
            took_s = services.clock() - started_s
            services.metrics.http_request_ended(route, status, took_s)
            if services.access_log is not None:
                line = self._access_line(request, route, status, took_s)
                services.access_log.add(lambda: (line,))

    def _access_line(
        self, request: Request, route: str, status: int, took_s: float
    ) -> dict[str, Any]:
        trace = request.get(TRACE)
        prompt, output = request.get(TOKENS, (0, 0)) if trace is None else trace.usage
        return {
            "at_s": round(self._services.wall() - took_s, 6),
            "request_id": request[REQUEST_ID],
            "tenant": request.get(TENANT),
            "method": request.method,
            "route": route,
            "model": request.get(ASKED),
            "status": status,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "took_s": round(took_s, 6),
            "first_token_s": None if trace is None else trace.first_token_s,
            "trace_id": None if trace is None else trace.id,
        }

    def count(self, request: Request, agents: int) -> None:
        """Count `agents` more for a request, which counts as running from the first time on.

        One of several tenants may not take the places of others; a single tenant has all of the
        router. Raises InvalidRequest where the request alone needs too many, and Overloaded where
        its tenant has too many now.
        """
        tenant = request[TENANT]
        limit = self._settings.max_agents_per_tenant
        several = self.keys.several
        if several and (whole := request.get(AGENTS, 0) + agents) > limit:
            raise InvalidRequest(
                f"The request needs {whole} agents, and a tenant may have {limit} at a time.",
                remedy="Ask for fewer, or raise limits.max_agents_per_tenant.",
            )
        if several and self._agents[tenant] + agents > limit:
            raise Overloaded(
                f"{self._agents[tenant]} agents of {tenant!r} are running or waiting, of at most "
                f"{limit}, and this"
                f" request needs {agents} more.",
                remedy=(
                    f"Try again in {self._settings.retry_after_s} s, or raise "
                    "limits.max_agents_per_tenant."
                ),
            )
        self._drain.running += AGENTS not in request
        self._agents[tenant] += agents
        request[AGENTS] = request.get(AGENTS, 0) + agents

    def _ended(self, tenant: str, agents: int, _: object = None) -> None:
        self._drain.ended()
        self._agents[tenant] -= agents

    def detach(self, request: Request, run: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run what goes on after its request, which counts as running until both have ended."""
        task = request[DETACHED] = asyncio.create_task(run)
        self._detached.add(task)
        task.add_done_callback(self._detached_ended)
        return task

    def _detached_ended(self, task: "asyncio.Task[Any]") -> None:
        self._detached.discard(task)
        if not task.cancelled():
            task.exception()  # read, or asyncio would report it as lost

    def _require_tokens(self, limit: int | None, tenant: str) -> None:
        if (
            limit
            and (wait_s := self._services.rates.wait_s(tenant, limit, self._services.clock())) > 0
        ):
            raise Overloaded(
                f"{tenant!r} has used its {limit} tokens of this minute.",
                remedy="Try again when Retry-After says.",
                retry_s=wait_s,
            )

    def _key(self, request: Request) -> ApiKey:
        if request.path in OPEN_ROUTES:
            return LOCAL
        if isinstance(request, PlainRequest):
            address = request.peername
        elif request.transport:
            address = request.transport.get_extra_info("peername")
        else:
            address = None
        if isinstance(address, tuple):
            peer = address[0]
        else:
            peer = None
        if not self.keys:
            if peer is not None:
                posts_json = request.method == "POST" and request.path != "/v1/files"
                if posts_json:
                    kind = request.headers.get("content-type", "")
                else:
                    kind = ""
                require_local(request.headers.get("host", ""), request.headers.get("origin"), kind)
            return self.keys.caller("", peer, self._services.wall)
        key = (
            request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
        )  # Anthropic's
        return self.keys.caller(key, peer, self._services.wall)

    def problem_reply(self, request: Request, error: Exception, status: int | None = None) -> Reply:
        """The answer to what has failed; `status` is another than the error's own."""
        problem = problem_of(error)
        if problem is INTERNAL:
            log.error("request %s: %s failed", request[REQUEST_ID], _route(request), exc_info=error)
        headers = {}
        if (
            status := status or problem.status
        ) == 429:  # also where an agent of the request was refused
            if isinstance(error, Overloaded):
                wait_s = error.retry_s
            else:
                wait_s = None
            headers["Retry-After"] = str(math.ceil(wait_s or self._settings.retry_after_s))
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return problem_reply(request, error, status, **headers)


ADMISSION = web.AppKey("ADMISSION", Admission)


def _route(request: Request) -> str:
    """The route's pattern: a client cannot make up new ones."""
    if isinstance(request, PlainRequest):
        return request.path
    resource = request.match_info.route.resource
    if resource is not None:
        return resource.canonical
    return "unmatched"
