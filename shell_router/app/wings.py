"""The tables of engine kinds and wings, each of which is imported when a deployment needs it.

A new engine kind is a class with the shape of `EngineKind`, and an entry in ENGINE_KINDS.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shell_router.app.model_files import ModelFiles
from shell_router.config import Config, ModelSettings, read_config
from shell_router.config.settings import Kinds
from shell_router.core.engine import CallParser, Engine, Relay
from shell_router.core.predictors import Predictor

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from shell_router.engines.address import Address
    from shell_router.engines.fleet import Fleet

ENGINE_KINDS: Mapping[str, str] = {
    "pairs": "shell_router.app.pairs:SglangPairs",
    "embedded": "shell_router.standins.embedded.kind:Embedded",
}
"""Engine kinds by the setting of a model that asks for them, as in `models.small.embedded`."""
DEFAULT_KIND = "embedded"

WINGS: Mapping[str, str] = {
    "batch": "shell_router.batch.api.routes:attach_batches",
    "prediction": "shell_router.prediction.service:running_predictor",
    "sleep": "shell_router.swapping.sleep:put_to_sleep",
    "swapping": "shell_router.swapping.kind:Swapping",
}
"""What attaches each wing, each a function that gives a context manager.

`batch(config)`, where the deployment has a folder for batches, adds the Batch API's routes to an
application. `prediction(settings)`, where it names a trained predictor, gives a `RunningPredictor`.
`swapping()`, where models take turns in memory, is the `EngineKind` that serves those;
`sleep(servers, limit_s)` puts servers to sleep that were started for it.
"""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A model's engine, ready to serve, and all that a deployment does with it.

    Attributes:
        engine: Serves the model's requests.
        name: What it is, in words.
        batch_size: Sequences that it decodes together.
        fleet: The model's servers, which give readiness, metrics, and the cost of prefill. None for
            models that take turns on servers.
        relay: Takes native requests and the engine's own chats; None without such routes.
        call_parser: Reads tool calls of a format that the router does not know.
        adapters: The engine and the relay of each LoRA adapter.
        read_address: Reads an address that an operator adds to the fleet, or raises InvalidField or
            ConfigError. None if the fleet cannot change.
        restarts: Gives the restarts of each process, by name.
        shared_fleets: The servers of models that take turns: by model, or by number if their
            weights are swapped.
        metrics: The metrics of all models that take turns with it.
    """

    engine: Engine
    name: str
    batch_size: int
    fleet: "Fleet[Any] | None"
    relay: Relay | None = None
    call_parser: CallParser | None = None
    adapters: Mapping[str, tuple[Engine, Relay]] = field(default_factory=dict)
    read_address: "Callable[[Mapping[str, Any]], Address] | None" = None
    restarts: Callable[[], Mapping[str, int]] = dict
    shared_fleets: Mapping[str, "Fleet[Any]"] = field(default_factory=dict)
    metrics: "Collector | None" = None


class EngineKind(Protocol):
    """A way to serve models. It is made without arguments, and raises ConfigError where it lacks an
    installed extra.
    """

    settings: ClassVar[type]
    """The dataclass of what a model says of it, with a description of each setting (see
    `files.read`).
    """

    def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AbstractAsyncContextManager[Mapping[str, StartedEngine]]:
        """Serve the models whose `files` these are, by alias, while the context is open; all of
        them are ready then.

        `on_progress` gets a line per step. Raises ConfigError and EngineError.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunningPredictor:
    """The predictor, None where there is none, and per trained predictor whether it can be
    asked."""

    predictor: Predictor | None = None
    checks: Mapping[str, Callable[[], Awaitable[bool]]] = field(default_factory=dict)


def kind_of(model: ModelSettings) -> str:
    """The engine kind that serves the model."""
    if model.pairs:
        return "pairs"
    return next(iter(model.engine), DEFAULT_KIND)


def kind_settings() -> Kinds:
    """Per engine kind what gives the dataclass of its settings, imported when it is called."""

    def settings(entry: str) -> type:
        kind: type[EngineKind] = loaded(entry)
        return kind.settings

    return {
        name: partial(settings, entry) for name, entry in ENGINE_KINDS.items() if name != "pairs"
    }


def load_config(path: Path, environ: Mapping[str, str], *, with_keys: bool = True) -> Config:
    """The deployment that `path` describes, of any engine kind; see `config.read_config`."""
    return read_config(path, environ, with_keys=with_keys, kinds=kind_settings())


def engine_kind(name: str) -> EngineKind:
    """An engine kind of the table."""
    kind: EngineKind = loaded({**WINGS, **ENGINE_KINDS}[name])()
    return kind


def wing(name: str) -> Any:
    """What attaches a wing of the table."""
    return loaded(WINGS[name])


def loaded(entry: str) -> Any:
    """What an entry of these tables names, its module imported."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)
