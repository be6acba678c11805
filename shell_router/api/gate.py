"""The one middleware: request ids, keys, the limit on running requests, errors and the request metrics."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from aiohttp import ClientConnectionResetError, web

from shell_router.api.access import LOCAL_TENANT, tenant_of
from shell_router.api.drain import Drain
from shell_router.api.problems import INTERNAL, problem_body, problem_of
from shell_router.api.replies import json_reply
from shell_router.api.services import REQUEST_ID, TENANT, Services
from shell_router.api.settings import ApiSettings
from shell_router.errors import Overloaded

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset({"/health", "/ready"})  # probes carry no key
CLIENT_GONE = 499  # nginx's number for it; no client ever sees it
ACCEPTED_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

log = logging.getLogger(__name__)


class Gate:
    """Stands before every route of one app and limits its running requests."""

    def __init__(self, services: Services, settings: ApiSettings, drain: Drain) -> None:
        self._services = services
        self._settings = settings
        self._drain = drain
        services.metrics.running_requests.set_function(lambda: drain.running)

    @web.middleware
    async def serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer `request` by its route, or with the error that its route raised."""
        started_s = self._services.clock()
        request[REQUEST_ID] = self._request_id(request)
        status = CLIENT_GONE
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            took_s = self._services.clock() - started_s
            self._services.metrics.http_request_ended(_route(request), status, took_s)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            request[TENANT] = self._tenant(request)
            if request.method != "POST":
                return await handler(request)
            return await self._within_limit(request, handler)
        except asyncio.CancelledError:
            raise
        except ClientConnectionResetError:
            return web.Response(status=CLIENT_GONE)  # raised, aiohttp would log it as an error
        except Exception as error:
            return self._problem_reply(request, error)

    async def _within_limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._drain.running >= self._settings.max_running:
            raise Overloaded(
                f"{self._drain.running} requests are running, which is this server's limit.",
                remedy=f"Try again in {self._settings.retry_after_s} s, or raise max_running.",
            )
        with self._drain.counted():
            return await handler(request)

    def _tenant(self, request: web.Request) -> str:
        if request.path in OPEN_ROUTES:
            return LOCAL_TENANT
        transport = request.transport
        address = transport.get_extra_info("peername") if transport else None
        peer = address[0] if isinstance(address, tuple) else None
        return tenant_of(self._settings.keys, request.headers.get("Authorization", ""), peer)

    def _request_id(self, request: web.Request) -> str:
        """The client's own, so that it finds its request in our log, if it is fit to be written there."""
        given = request.headers.get("x-request-id", "")
        return given if ACCEPTED_REQUEST_ID.fullmatch(given) else self._services.new_id()

    def _problem_reply(self, request: web.Request, error: Exception) -> web.Response:
        problem = problem_of(error)
        if problem is INTERNAL:
            log.error("request %s: %s failed", request[REQUEST_ID], _route(request), exc_info=error)
        headers = {}
        if isinstance(error, Overloaded):
            headers["Retry-After"] = str(self._settings.retry_after_s)
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        body = problem_body(error, request[REQUEST_ID])
        return json_reply(request, body, status=problem.status, headers=headers)


def _route(request: web.Request) -> str:
    """The route's pattern: a client cannot make up new ones."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"
