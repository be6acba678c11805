"""The gate before every route: request ids, keys, limits on running work, and errors as replies."""

import asyncio
import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from shell_router.api.access_log import format_line
from shell_router.api.drain import Drain
from shell_router.api.keys import (
    LOCAL,
    Keys,
    require_local,
    require_route,
    require_unlisted_type,
)
from shell_router.api.replies import (
    INTERNAL,
    cors_headers,
    preflight_reply,
    problem_of,
    problem_reply,
)
from shell_router.api.services import (
    AGENTS,
    KEY,
    MODELS_ASKED,
    REQUEST_ID,
    TENANT,
    ApiSettings,
    Services,
)
from shell_router.config import ApiKey
from shell_router.core.spans import CURRENT, read_client_span
from shell_router.errors import Forbidden, InvalidRequest, Overloaded, UnsupportedMediaType
from shell_router.http.app import (
    CODINGS,
    ClientGone,
    Handler,
    Key,
    MethodNotAllowed,
    Reply,
    Request,
    Response,
    allowed_methods,
)

log = logging.getLogger(__name__)

OPEN_ROUTES = frozenset({"/", "/health", "/ready", "/ui"})
"""Routes without a key: probes carry none, and the page is static, and sends one."""
FREEING = frozenset({"/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/cancel"})
"""Routes that make space, and are never refused for lack of it."""
UPLOADS = "/v1/files"
CLIENT_GONE = 499  # nginx's number for it; no client ever sees it
ACCEPTED_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
DETACHED = Key["asyncio.Task[Any]"]("DETACHED")
"""A run that goes on after its request."""


class Admission:
    """The gate of one application, which limits its running requests."""

    def __init__(self, services: Services, settings: ApiSettings, drain: Drain) -> None:
        self._services = services
        self._settings = settings
        self._drain = drain
        self._agents: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._detached: set[asyncio.Task[Any]] = set()
        self.keys = Keys(settings.keys, services.budgets.take)
        services.metrics.running_requests.set_function(lambda: drain.running)

    async def serve(self, request: Request, handler: Handler) -> Reply:
        """Answer `request` by its handler, or with the error that it raised."""
        started_s = self._services.clock()
        headers = request.headers
        CURRENT.set(read_client_span(headers) if "traceparent" in headers else None)
        sent_id = headers.get("x-request-id", "")
        if ACCEPTED_REQUEST_ID.fullmatch(sent_id):  # fit to be written to the log
            request[REQUEST_ID] = sent_id
        else:
            request[REQUEST_ID] = self._services.new_id()
        status = CLIENT_GONE
        try:
            if request.method == "OPTIONS" and cors_headers(request):
                reply: Reply = preflight_reply(request)
            else:
                self._admit(request)
                reply = await handler(request)
            status = reply.status
            return reply
        except ClientGone:
            return Response(CLIENT_GONE, {}, b"")
        except Exception as error:
            problem = self.problem_reply(request, error)
            status = problem.status
            return problem
        finally:
            self._release(request)
            self._record(request, status, started_s)

    def _admit(self, request: Request) -> None:
        """Note the request's key and count it; raise the error of one that is not served."""
        key = self._find_key(request)
        tenant = key.tenant or ""
        request[KEY] = key
        request[TENANT] = tenant
        if key is not LOCAL:
            require_route(key, request.method, request.path, request.route)
        codings = CODINGS if request.path != UPLOADS else CODINGS[:1]
        if request.coding not in codings:
            raise UnsupportedMediaType(
                "The body has another Content-Encoding than this route takes.",
                remedy=f"Send one of: {', '.join(codings)}.",
            )
        if request.method not in ("POST", "PUT") or request.route in FREEING:
            return
        if key.tokens_per_minute:
            self._require_tokens(key.tokens_per_minute, tenant)
        if self._drain.running >= self._settings.max_running:
            raise Overloaded(
                f"{self._drain.running} requests are running, which is this server's limit.",
                remedy=f"Try again in {self._settings.retry_after_s} s, or raise max_running.",
            )
        self.count(request, 1)

    def _find_key(self, request: Request) -> ApiKey:
        if request.path in OPEN_ROUTES:
            return LOCAL
        headers = request.headers
        if self.keys.by_digest:
            x_api_key = headers.get("x-api-key", "")  # Anthropic's
            secret = headers.get("authorization") or f"Bearer {x_api_key}"
            return self.keys.find(secret, self._services.wall)
        if request.peer is not None:  # only this machine reaches a Unix socket
            origin = None if cors_headers(request) else headers.get("origin")
            require_local(request.peer, headers.get("host", ""), origin)
            if request.method == "POST" and request.path != UPLOADS:
                require_unlisted_type(headers.get("content-type", ""))
        return LOCAL

    def _require_tokens(self, limit: int, tenant: str) -> None:
        wait_s = self._services.rates.wait_s(tenant, limit, self._services.clock())
        if wait_s > 0:
            raise Overloaded(
                f"{tenant!r} has used its {limit} tokens of this minute.",
                remedy="Try again when Retry-After says.",
                retry_s=wait_s,
            )

    def count(self, request: Request, agents: int) -> None:
        """Count `agents` more for a request, which runs from the first call on.

        One of several tenants may not take the places of others; a single tenant has all of the
        router.

        Raises:
            InvalidRequest: The request alone needs more agents than a tenant may have.
            Overloaded: The tenant has too many now.
        """
        tenant = request[TENANT]
        before = request.get(AGENTS, 0)
        if self.keys.several:
            self._require_agents(tenant, before + agents, agents)
        self._drain.running += AGENTS not in request
        self._agents[tenant] += agents
        request[AGENTS] = before + agents

    def _require_agents(self, tenant: str, whole: int, more: int) -> None:
        limit = self._settings.max_agents_per_tenant
        if whole > limit:
            raise InvalidRequest(
                f"The request needs {whole} agents, and a tenant may have {limit} at a time.",
                remedy="Ask for fewer, or raise limits.max_agents_per_tenant.",
            )
        running = self._agents[tenant]
        if running + more > limit:
            raise Overloaded(
                f"{running} agents of {tenant!r} are running or waiting, of at most {limit}, and "
                f"this request needs {more} more.",
                remedy=f"Try again in {self._settings.retry_after_s} s, or raise "
                "limits.max_agents_per_tenant.",
            )

    @contextmanager
    def wait(self, request: Request) -> Iterator[None]:
        """Count a read that waits for what runs: it takes a connection, and no agent's place.

        All such reads may have half of the connections, so that probes are always answered.

        Raises:
            Overloaded: Too many reads wait, of all tenants or of one of several.
        """
        tenant = request[TENANT]
        limits = [(self._waiting.total(), self._settings.max_connections // 2)]
        if self.keys.several:
            limits.append((self._waiting[tenant], self._settings.max_agents_per_tenant))
        for waiting, most in limits:
            if waiting >= most:
                raise Overloaded(
                    f"{waiting} reads wait for outputs already, of at most {most}.",
                    remedy="Wait for fewer outputs at a time, or raise limits.max_connections and "
                    "limits.max_agents_per_tenant.",
                )
        self._waiting[tenant] += 1
        try:
            yield
        finally:
            self._waiting[tenant] -= 1

    def detach(self, request: Request, run: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a run that goes on after its request, which is counted until both have ended."""
        task = asyncio.create_task(run)
        request[DETACHED] = task
        self._detached.add(task)
        task.add_done_callback(self._forget_detached)
        return task

    def _forget_detached(self, task: "asyncio.Task[Any]") -> None:
        self._detached.discard(task)
        if not task.cancelled():
            task.exception()  # read, or asyncio would report it as lost

    def _release(self, request: Request) -> None:
        """Count the request no more, once it and what it detached have ended."""
        if AGENTS not in request:
            return
        release = functools.partial(self._release_agents, request[TENANT], request[AGENTS])
        if DETACHED in request:
            request[DETACHED].add_done_callback(release)
        else:
            release()

    def _release_agents(self, tenant: str, agents: int, _: object = None) -> None:
        self._agents[tenant] -= agents
        self._drain.running -= 1
        if not self._drain.running:
            self._drain.idle.set()

    def _record(self, request: Request, status: int, started_s: float) -> None:
        services = self._services
        took_s = services.clock() - started_s
        services.metrics.count_http_request(request.route, status, took_s)
        if services.access_log is not None:
            line = format_line(request, status, services.wall() - took_s, took_s)
            services.access_log.add(lambda: (line,))

    def problem_reply(
        self, request: Request, error: Exception, status: int | None = None
    ) -> Response:
        """Return the reply to an error; `status` replaces the error's own."""
        problem = problem_of(error)
        status = status or problem.status
        if problem is INTERNAL:
            log.error("request %s: %s failed", request[REQUEST_ID], request.route, exc_info=error)
        headers = {}
        if status in (429, 503):  # also where an agent of the request was refused
            waits_s = (getattr(each, "retry_s", None) for each in (error, error.__cause__))
            wait_s = next(filter(None, waits_s), None)
            headers["Retry-After"] = str(math.ceil(wait_s or self._settings.retry_after_s))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if isinstance(error, MethodNotAllowed):
            headers["Allow"] = allowed_methods(error)
        return problem_reply(request, error, status, **headers)


def permit(request: Request, models: Collection[str], asked: str = "") -> None:
    """Raise Forbidden unless the request's key is for all of these models.

    The access log names them, or what is `asked` for.
    """
    allowed = request[KEY].models
    request[MODELS_ASKED] = (asked or ",".join(models))[:200]
    if allowed and not set(models) <= set(allowed):
        raise Forbidden(
            "The API key is not for all of the models.", remedy=f"It is for: {', '.join(allowed)}."
        )


ADMISSION = Key[Admission]("ADMISSION")
