"""The services that routes call, as protocols and values, and the API's settings."""

import secrets
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from agent_cache import Journals
from agent_cache.accounts import MemoryAccounts
from shell_router.api.budgets import TenantBudgets
from shell_router.api.live import LiveTopologies
from shell_router.config import ApiKey, Limits, UsageCount
from shell_router.core.engine import Placement, Relay, ServedModel
from shell_router.core.events import Emit
from shell_router.core.predictors import Embedder
from shell_router.http.app import Key
from shell_router.moa.deadline import Deadlines
from shell_router.moa.programs import Programs
from shell_router.moa.requests import Answer, MoaRequest
from shell_router.routing.holdout import Holdouts
from shell_router.telemetry import Metrics, TokenRates, Trace, TraceStore
from shell_router.topology import Graph

if TYPE_CHECKING:
    from shell_router.telemetry.otlp import SpanExport
    from shell_router.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ApiSettings(Limits):
    """The deployment's limits, and keys, which map a name to its secret or key.

    The name is the tenant unless the key says another; without keys only callers on this machine
    are served. Pages of the origins in `cors` may ask from browsers. Lazy agents count as running
    requests, lines of batches do not. `ping_s` is the silence after which a stream gets a comment
    line.
    """

    keys: Mapping[str, str | ApiKey] = field(default_factory=dict, repr=False)
    cors: Collection[str] = ()
    retry_after_s: int = 1
    ready_timeout_s: float = 5.0
    ping_s: float = 15.0
    usage: UsageCount = "all"


new_run_id: Callable[[], str] = partial(secrets.token_hex, 16)

ENGINE_CHECK = "engine "
"""The name of a check of a model's engines begins with this; the model's alias follows."""

ReadinessCheck = Callable[[], Awaitable[bool]]


class Runs(Protocol):
    """The executor of requests through topologies of both kinds: moa.Executor."""

    def run(self, topology: Graph, request: MoaRequest, emit: Emit) -> Coroutine[Any, Any, Answer]:
        """See moa.Executor."""


class FleetChanges(Protocol):
    """Operators' changes of models' servers: app.fleet_changes.FleetChanges."""

    def roles(self, alias: str) -> Sequence[str]:
        """Return the roles of the model's servers."""

    def listed(self) -> Iterator[Mapping[str, str]]:
        """Iterate over the servers of all models."""

    async def add(self, alias: str, fields: Mapping[str, Any]) -> Mapping[str, str]:
        """Add servers, whose addresses are in `fields`, to the model; return their URLs by role."""

    async def drain(self, alias: str, urls: Mapping[str, str], limit_s: float) -> int:
        """Send these servers no more requests; return how many run there after `limit_s`."""


@dataclass(frozen=True)
class Services:
    """The services that routes may call.

    Attributes:
        engines: What serves each model, in words, where it is known.
        embedders: Embedding models by their names.
        serving: Whether the engines of each model seem to serve.
        checks: Readiness checks by the names that operators read, as "engine small" or "cache".
        optional_checks: The checks whose failure does not make the router unready: requests are
            only slower or less shared. A model's engine is no reason, while another model serves.
        recorder: Gets the lines of every run.
        access_log: Gets a line of every request.
        journals: Keep the runs with an Idempotency-Key.
        spans: Gets the finished runs.
        holdouts: The savings of incremental prefill and drafts.
        rates: The tokens that tenants used of late.
        budgets: What tenants and their programs may spend.
        deadlines: The open deadlines of requests, which a stop of the server ends.
        clock: The runs' clock, in monotonic seconds.
        wall: Gives Unix time.
        new_id: Gives a fresh id that cannot be guessed.
    """

    executor: Runs
    programs: Programs
    topologies: LiveTopologies
    models: Mapping[str, ServedModel]
    relays: Mapping[str, Relay]
    fleet: FleetChanges
    engines: Mapping[str, str] = field(default_factory=dict)
    embedders: Mapping[str, Embedder] = field(default_factory=dict)
    serving: Callable[[], Mapping[str, bool]] = dict
    checks: Mapping[str, ReadinessCheck] = field(default_factory=dict)
    optional_checks: Collection[str] = ()
    metrics: Metrics = field(default_factory=Metrics)
    traces: TraceStore = field(default_factory=TraceStore)
    recorder: "Recorder | None" = None
    access_log: "Recorder | None" = None
    journals: Journals | None = None
    spans: "SpanExport | None" = None
    holdouts: Holdouts = field(default_factory=Holdouts)
    rates: TokenRates = field(default_factory=TokenRates)
    budgets: TenantBudgets = field(
        default_factory=lambda: TenantBudgets(MemoryAccounts(time.monotonic), time.time)
    )
    deadlines: Deadlines = field(default_factory=Deadlines)
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    new_id: Callable[[], str] = new_run_id


SERVICES = Key[Services]("SERVICES")
SETTINGS = Key[ApiSettings]("SETTINGS")
STARTED_AT = Key[int]("STARTED_AT")
KEY = Key[ApiKey]("KEY")
TENANT = Key[str]("TENANT")
AGENTS = Key[int]("AGENTS")
"""The agents that a request has been counted for; one without it does not count as running."""
MODELS_ASKED = Key[str]("MODELS_ASKED")
"""The models or topologies that a request names."""
TOKENS = Key[tuple[int, int]]("TOKENS")
"""The tokens of prompts and of outputs of a native request, which has no trace."""
REQUEST_ID = Key[str]("REQUEST_ID")
TRACE = Key[Trace]("TRACE")
PLACED = Key[Callable[[], tuple[Placement, ...]]]("PLACED")
"""The engines of a native request, which has no trace."""
IGNORED = Key[list[str]]("IGNORED")
"""The fields of the body that had no effect."""
OWN_NAMES = Key[Mapping[str, str]]("OWN_NAMES")
"""The fields of the client's body, by those of the chat that was made from it."""
