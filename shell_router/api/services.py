"""What the API works with, as protocols and values; wiring.py chooses the implementations."""

import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from shell_router.api.batch.folder import BatchFolder
from shell_router.api.batch.lines import LineRunner
from shell_router.api.settings import ApiSettings
from shell_router.core.events import Event
from shell_router.core.model import ServedModel
from shell_router.core.placement import Placed
from shell_router.core.relay import Relay
from shell_router.execution import AgentRequest, Answer, MoaRequest, ProgramState
from shell_router.telemetry import Metrics, Recorder, Trace, TraceStore
from shell_router.topology import Graph

Emit = Callable[[Event], None]
ReadinessCheck = Callable[[], Awaitable[bool]]


class Runs(Protocol):
    """Runs requests through topologies of both kinds: execution.StepExecutor."""

    async def run(self, topology: Graph, request: MoaRequest, emit: Emit) -> Answer: ...


class AgentPrograms(Protocol):
    """Runs agents of other people's frameworks: execution.Programs."""

    async def run(self, request: AgentRequest, emit: Emit) -> Answer: ...

    def state(self, tenant: str, program: str) -> ProgramState: ...

    async def cancel(self, tenant: str, program: str) -> None: ...


@dataclass(frozen=True)
class Services:
    """Everything a route may call.

    `engines` says in words what serves each model, where that is known. `checks` are named as operators should read
    them ("engine small", "cache"); those named in `dispensable` only make requests slower or less shared when they
    fail, so they do not make the router unready. Without a `batch_folder` no files are kept and no batches run;
    `batch_pools` answer lines that name one of them as their model. A `recorder` gets the lines of every run.
    `clock` is the runs' clock in monotonic seconds, `wall` Unix time, `new_id` gives a fresh unguessable id.
    """

    executor: Runs
    programs: AgentPrograms
    topologies: Mapping[str, Graph]
    models: Mapping[str, ServedModel]
    relays: Mapping[str, Relay]
    engines: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, ReadinessCheck] = field(default_factory=dict)
    dispensable: Collection[str] = ()
    batch_folder: BatchFolder | None = None
    batch_pools: Mapping[str, LineRunner] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    traces: TraceStore = field(default_factory=TraceStore)
    recorder: Recorder | None = None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: secrets.token_hex(16)


SERVICES = web.AppKey("SERVICES", Services)
SETTINGS = web.AppKey("SETTINGS", ApiSettings)
STARTED_AT = web.AppKey("STARTED_AT", int)
TENANT = web.RequestKey("TENANT", str)
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
TRACE = web.RequestKey("TRACE", Trace)
PLACED: web.RequestKey[Callable[[], tuple[Placed, ...]]] = web.RequestKey("PLACED")
"""Of native requests, which have no trace."""
IGNORED = web.RequestKey("IGNORED", str)
