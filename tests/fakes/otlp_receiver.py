"""A receiver of OTLP over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Receiver:
    """Takes OTLP/HTTP as a collector does."""

    url: str = ""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        self.requests.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(content_type="application/x-protobuf")

    @property
    def schemas(self) -> set[str]:
        """URLs of the schemas that the spans follow."""
        resources = [resource for request in self.requests for resource in request.resource_spans]
        return {scope.schema_url for resource in resources for scope in resource.scope_spans}

    @property
    def spans(self) -> dict[str, list[Span]]:
        """By name."""
        found: dict[str, list[Span]] = {}
        for request in self.requests:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        found.setdefault(span.name, []).append(span)
        return found


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    found, app = Receiver(), web.Application()
    app.router.add_post("/v1/traces", found.take)
    async with TestServer(app) as server:
        found.url = str(server.make_url("/v1/traces"))
        yield found
