"""Before every route: request ids, API keys, the limit on running requests, errors, and the end of the server."""

import asyncio
import functools
import hmac
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import urlsplit

from aiohttp import ClientConnectionResetError, web

from shell_router.api.plain import Connections, Handler, PlainRequest, Reply, Request
from shell_router.api.replies import INTERNAL, json_reply, problem_body, problem_of
from shell_router.api.services import AGENTS, REQUEST_ID, TENANT, ApiSettings, Services
from shell_router.errors import Overloaded, RemoteRefused, RouterStopping, Unauthorized

LOCAL_TENANT = "local"


def tenant_of(keys: Mapping[str, str], authorization: str, peer: str | None) -> str:
    """The caller's tenant: the name of its key, or LOCAL_TENANT where no keys are set.

    `peer` is the caller's address; None for a Unix socket, which only this machine reaches. Raises Unauthorized.
    """
    if not keys:
        if peer is not None and not _is_loopback(peer):
            raise RemoteRefused(
                f"No API keys are set, so only callers on this machine are served, and {peer} is not.",
                remedy="Add api_keys to the configuration and send one as 'Authorization: Bearer <key>'.",
            )
        return LOCAL_TENANT
    return _key_holder(keys, authorization)


def require_local(host: str, origin: str | None) -> None:
    """Raise RemoteRefused for what a browser of this machine sends for a page from elsewhere.

    Such a page may have its own name resolved to this machine, and may post what needs no permission.
    """
    named = urlsplit(f"//{host}").hostname if _HOST.fullmatch(host) else ""
    page = urlsplit(origin).hostname or "" if origin is not None and _ORIGIN.fullmatch(origin) else origin
    for what, name in (("Host", named or "127.0.0.1" * (not host)), ("Origin", page)):
        if name is not None and not _names_this_machine(name):
            raise RemoteRefused(
                f"No API keys are set, so only this machine is served, and the header {what} names another.",
                remedy="Ask 127.0.0.1 or localhost, or add api_keys to the configuration.",
            )


_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]+)?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + _HOST.pattern, re.ASCII)


def _names_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return _is_loopback(name)
    except ValueError:
        return False


def _key_holder(keys: Mapping[str, str], authorization: str) -> str:
    """Compares with every key, in constant time each, so that timing says nothing of any."""
    scheme, _, secret = authorization.partition(" ")
    given = secret.strip().encode("utf-8", "surrogateescape")  # as aiohttp has read it
    matches = [name for name, key in keys.items() if hmac.compare_digest(key.encode(), given)]
    if scheme.lower() != "bearer" or not matches:
        raise Unauthorized(
            "The API key is missing or wrong.", remedy="Send a valid one as 'Authorization: Bearer <key>'."
        )
    return matches[0]


@functools.lru_cache(maxsize=1024)
def _is_loopback(peer: str) -> bool:
    address = ipaddress.ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


log = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""The time that cut requests get to send their clients the error."""


class Drain:
    """The running requests of one app. A stop of the server waits for them, and cuts those that take too long."""

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
        return Deadline(self, limit_s)

    async def finish(self, limit_s: float, force_shutdown: asyncio.Event) -> None:
        """Return when no request runs; cut those that still run after `limit_s`, or once `force_shutdown` is set."""
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


class Deadline:
    """See `Drain.deadline`. asyncio's own timeout costs three times as much, which small requests feel."""

    __slots__ = ("_cancelling", "_drain", "_error", "_limit_s", "_task", "_timer")

    def __init__(self, drain: Drain, limit_s: float | None) -> None:
        self._drain = drain
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> None:
        if self._drain.cut:
            raise _stopping()
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        if self._limit_s is not None:
            self._timer = task.get_loop().call_later(self._limit_s, self.end, TimeoutError())
        self._drain.deadlines.add(self)

    def end(self, error: Exception) -> None:
        """Cancel what is inside, which then raises `error`; the first call counts: it may still leave its engine."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._drain.deadlines.discard(self)
        if self._error is not None and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from None


def _stopping() -> RouterStopping:
    return RouterStopping(
        "The router stopped before this request had ended.",
        remedy="Send it again, to another router or once this one is back.",
    )


DRAIN = web.AppKey("DRAIN", Drain)


OPEN_ROUTES = frozenset({"/health", "/ready"})  # probes carry no key
CLIENT_GONE = 499  # nginx's number for it; no client ever sees it
ACCEPTED_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Admission:
    """Stands before every route of one app and limits its running requests."""

    def __init__(self, services: Services, settings: ApiSettings, drain: Drain) -> None:
        self._services = services
        self._settings = settings
        self._drain = drain
        self._agents: Counter[str] = Counter()
        self.connections = Connections(settings)
        services.metrics.running_requests.set_function(lambda: drain.running)

    @web.middleware
    async def serve(self, request: Request, handler: Handler) -> Reply:
        """Answer `request` by its route, or with the error that its route raised."""
        services, drain, started_s = self._services, self._drain, self._services.clock()
        given = request.headers.get("x-request-id", "")  # the client's own, if it is fit to be written to the log
        request[REQUEST_ID] = given if ACCEPTED_REQUEST_ID.fullmatch(given) else services.new_id()
        status, admitted, by_aiohttp = CLIENT_GONE, False, isinstance(request, web.Request)
        if by_aiohttp:
            self.connections.busy(request.transport)
        try:
            request[TENANT] = self._tenant(request)
            if request.method == "POST" and not request.path.endswith("/cancel"):  # what makes space is never refused
                if drain.running >= self._settings.max_running:
                    raise Overloaded(
                        f"{drain.running} requests are running, which is this server's limit.",
                        remedy=f"Try again in {self._settings.retry_after_s} s, or raise max_running.",
                    )
                drain.running += 1
                admitted = True
                self.count(request, 1)
            reply = await handler(request)
            status = reply.status
            return reply
        except asyncio.CancelledError:
            raise
        except ClientConnectionResetError:
            return web.Response(status=CLIENT_GONE)  # raised, aiohttp would log it as an error
        except Exception as error:
            problem = self._problem_reply(request, error)
            status = problem.status
            return problem
        finally:
            if by_aiohttp:
                self.connections.idle(request.transport)
            if admitted:
                drain.ended()
                self._agents[request[TENANT]] -= request.get(AGENTS, 0)
            services.metrics.http_request_ended(_route(request), status, services.clock() - started_s)

    def count(self, request: Request, agents: int) -> None:
        """Count `agents` more for a running request; raises Overloaded where its tenant has too many.

        A tenant alone has all of the router. Others must not be refused for what one of several asks for.
        """
        tenant, limit = request[TENANT], self._settings.max_agents_per_tenant
        if len(self._settings.keys) > 1 and self._agents[tenant] + agents > limit:
            raise Overloaded(
                f"{self._agents[tenant]} agents of {tenant!r} are running or waiting, of at most {limit}, and this"
                f" request needs {agents} more.",
                remedy=f"Try again in {self._settings.retry_after_s} s, or raise max_agents_per_tenant.",
            )
        self._agents[tenant] += agents
        request[AGENTS] = request.get(AGENTS, 0) + agents

    def _tenant(self, request: Request) -> str:
        if request.path in OPEN_ROUTES:
            return LOCAL_TENANT
        transport = request.transport
        address = transport.get_extra_info("peername") if transport else None
        peer = address[0] if isinstance(address, tuple) else None
        if not self._settings.keys and peer is not None:
            require_local(request.headers.get("host", ""), request.headers.get("origin"))
        return tenant_of(self._settings.keys, request.headers.get("authorization", ""), peer)

    def _problem_reply(self, request: Request, error: Exception) -> web.Response:
        problem = problem_of(error)
        if problem is INTERNAL:
            log.error("request %s: %s failed", request[REQUEST_ID], _route(request), exc_info=error)
        headers = {}
        if problem.status == 429:  # also where an agent of the request was refused
            headers["Retry-After"] = str(self._settings.retry_after_s)
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        body = problem_body(error, request[REQUEST_ID])
        return json_reply(request, body, status=problem.status, headers=headers)


ADMISSION = web.AppKey("ADMISSION", Admission)
CONNECTIONS = web.AppKey("CONNECTIONS", Connections)


def _route(request: Request) -> str:
    """The route's pattern: a client cannot make up new ones."""
    if isinstance(request, PlainRequest):
        return request.path
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"
