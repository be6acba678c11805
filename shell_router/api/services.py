"""What the API works with, as protocols and values, and its settings."""

import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from shell_router.api.live import LiveTopologies
from shell_router.core.engine import Placement, Relay, ServedModel
from shell_router.core.events import Event
from shell_router.moa import Answer, MoaRequest, Programs
from shell_router.routing.holdout import Holdouts
from shell_router.telemetry import Metrics, Trace, TraceStore
from shell_router.topology import Graph

if TYPE_CHECKING:
    from shell_router.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Keys, limits and times.

    `keys` maps a name, which becomes the tenant, to its secret; without keys only callers on this machine are
    served. `max_running` counts POST requests under way, `max_agents_per_tenant` the agents of those of one of
    several tenants; lines of batches are not among them. Beyond `max_connections` the longest idle one is closed, as is
    one that is idle for `idle_timeout_s`, or whose head or body takes `body_timeout_s`. `ping_s` is
    the silence after which a stream gets a comment line. A client that takes nothing of its stream for
    `write_timeout_s` is given up.
    """

    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_body_bytes: int = 8 * 2**20
    max_running: int = 1024
    max_agents_per_tenant: int = 512
    max_connections: int = 4096
    idle_timeout_s: float = 620.0
    retry_after_s: int = 1
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    ready_timeout_s: float = 5.0
    ping_s: float = 15.0

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name != "keys" and value <= 0:
                raise ValueError(f"{setting.name} must be above 0, not {value}")
        if not all(name and secret for name, secret in self.keys.items()):
            raise ValueError("keys must have a name and a secret each, neither of them empty")
        if len(set(self.keys.values())) < len(self.keys):
            raise ValueError("keys must differ: two names share a secret, so the tenant would be ambiguous")


new_run_id: Callable[[], str] = functools.partial(secrets.token_hex, 16)

ENGINE_CHECK = "engine "
"""What the checks of models' engines are called, before the model's alias."""

Emit = Callable[[Event], None]
ReadinessCheck = Callable[[], Awaitable[bool]]


class Runs(Protocol):
    """Runs requests through topologies of both kinds: moa.StepExecutor."""

    def run(self, topology: Graph, request: MoaRequest, emit: Emit) -> Coroutine[Any, Any, Answer]: ...


@dataclass(frozen=True)
class Services:
    """Everything a route may call.

    `engines` says in words what serves each model, where that is known. `checks` are named as operators should read
    them ("engine small", "cache"); those named in `optional_checks` only make requests slower or less shared when they
    fail, so they do not make the router unready. Nor does a model's engine, while another model's serves. A `recorder`
    gets the lines of every run. `holdouts` knows what incremental prefill and drafts save.
    `clock` is the runs' clock in monotonic seconds, `wall` Unix time, `new_id` gives a fresh unguessable id.
    """

    executor: Runs
    programs: Programs
    topologies: LiveTopologies
    models: Mapping[str, ServedModel]
    relays: Mapping[str, Relay]
    engines: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, ReadinessCheck] = field(default_factory=dict)
    optional_checks: Collection[str] = ()
    metrics: Metrics = field(default_factory=Metrics)
    traces: TraceStore = field(default_factory=TraceStore)
    recorder: "Recorder | None" = None
    holdouts: Holdouts = field(default_factory=Holdouts)
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    new_id: Callable[[], str] = new_run_id


SERVICES = web.AppKey("SERVICES", Services)
SETTINGS = web.AppKey("SETTINGS", ApiSettings)
STARTED_AT = web.AppKey("STARTED_AT", int)
TENANT = web.RequestKey("TENANT", str)
AGENTS = web.RequestKey("AGENTS", int)
"""Agents that the request has been counted for."""
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
TRACE = web.RequestKey("TRACE", Trace)
PLACED: web.RequestKey[Callable[[], tuple[Placement, ...]]] = web.RequestKey("PLACED")
"""Of native requests, which have no trace."""
IGNORED = web.RequestKey("IGNORED", str)
