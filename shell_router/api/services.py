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
from shell_router.api.live import LiveTopologies
from shell_router.config import ApiKey, Limits
from shell_router.core.engine import Placement, Relay, ServedModel
from shell_router.core.events import Emit
from shell_router.core.predictors import Embedder
from shell_router.http.app import Key
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
    are served. Lazy agents count as running requests, lines of batches do not. `ping_s` is the
    silence after which a stream gets a comment line.
    """

    keys: Mapping[str, str | ApiKey] = field(default_factory=dict, repr=False)
    retry_after_s: int = 1
    ready_timeout_s: float = 5.0
    ping_s: float = 15.0


def _ids() -> Iterator[str]:
    """Yield ids that cannot be guessed: 32 hexadecimal digits.

    They are drawn 256 at a time, because a system call is dear.
    """
    while True:
        drawn = secrets.token_hex(16 * 256)
        yield from (drawn[at : at + 32] for at in range(0, len(drawn), 32))


new_run_id: Callable[[], str] = partial(next, _ids())

ENGINE_CHECK = "engine "
"""The name of a check of a model's engines begins with this; the model's alias follows."""

ReadinessCheck = Callable[[], Awaitable[bool]]


class Runs(Protocol):
    """Runs requests through topologies of both kinds: moa.Executor."""

    def run(
        self, topology: Graph, request: MoaRequest, emit: Emit
    ) -> Coroutine[Any, Any, Answer]: ...


class FleetChanges(Protocol):
    """Operators' changes of models' servers: app.fleet_changes.FleetChanges."""

    def roles(self, alias: str) -> Sequence[str]: ...
    def listed(self) -> Iterator[Mapping[str, str]]: ...
    async def add(self, alias: str, fields: Mapping[str, Any]) -> None: ...
    async def drain(self, alias: str, urls: Mapping[str, str], limit_s: float) -> int: ...


@dataclass(frozen=True)
class Services:
    """Everything a route may call.

    `engines` says in words what serves each model, where that is known, and `serving` whether those
    engines seem to serve; `embedders` give vectors, by their names. `checks` are named as operators
    should read them ("engine small", "cache"); those named in `optional_checks` only make requests
    slower or less shared when they fail, so they do not make the router unready. Nor does a model's
    engine, while another model's serves. A `recorder` gets the lines of every run, an `access_log`
    one of every request, `spans` the finished runs. `journals` keep runs with an Idempotency-Key.
    `holdouts` knows what incremental prefill and drafts save, `rates` how many tokens tenants used.
    `clock` is the runs' clock in monotonic seconds, `wall` Unix time, `new_id` gives a fresh
    unguessable id.
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
