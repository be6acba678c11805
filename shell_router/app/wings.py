"""The tables of engine kinds and of wings, which are optional parts imported only when needed.

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
from shell_router.config.load import Kinds
from shell_router.core.engine import CallParser, Engine, Relay
from shell_router.core.predictors import Predictor

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from shell_router.engines.address import Address
    from shell_router.engines.fleet import Fleet

ENGINE_KINDS: Mapping[str, str] = {
    "pairs": "shell_router.app.pairs:SglangPairs",
    "openai": "shell_router.app.openai:OpenAIServers",
    "embedded": "shell_router.standins.embedded.kind:Embedded",
}
"""Engine kinds by the setting of a model that asks for them, as in `models.small.embedded`."""
DEFAULT_KIND = "embedded"

WINGS: Mapping[str, str] = {
    "batch": "shell_router.batch.api.routes:attach_batches",
    "prediction": "shell_router.prediction.service:run_predictor",
    "sleep": "shell_router.swapping.sleep:put_to_sleep",
    "swapping": "shell_router.swapping.kind:Swapping",
}
"""The function or class that attaches each wing, by the wing's name.

`batch(config)` adds the Batch API's routes to an application, if the deployment has a folder for
batches. `prediction(settings)` opens a `RunningPredictor`, if they name a trained predictor.
`swapping()` is the `EngineKind` of models that take turns in memory; `sleep(servers, limit_s)` puts
servers to sleep that were started for it.
"""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A model's engine, ready to serve, and the facts that a deployment needs about it.

    Attributes:
        engine: Serves the model's requests.
        name: The kind of engine, in words.
        batch_size: Sequences that it decodes together.
        fleet: The model's servers, for readiness, metrics, and the cost of prefill. None for
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
        takes_messages: See `ServedModel`.
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
    takes_messages: bool = False


class EngineKind(Protocol):
    """A way to serve models.

    The class is called without arguments, and raises ConfigError if its extra is not installed.
    """

    settings: ClassVar[type]
    """The dataclass of a model's settings for it, each with its description (see `files.read`)."""

    def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AbstractAsyncContextManager[Mapping[str, StartedEngine]]:
        """Serve models while the context is open; on entry all of them are ready.

        Args:
            files: The models' files by alias.
            config: The deployment.
            on_progress: Gets a line per step.

        Raises:
            ConfigError: A setting or a file is wrong.
            EngineError: An engine does not come up.
        """


@dataclass(frozen=True, slots=True)
class RunningPredictor:
    """The predictor, None without one, and per trained predictor a check whether it answers."""

    predictor: Predictor | None = None
    checks: Mapping[str, Callable[[], Awaitable[bool]]] = field(default_factory=dict)


def kind_of(model: ModelSettings) -> str:
    """Return the engine kind that serves the model."""
    if model.sglang:
        return "pairs"
    return next(iter(model.engine), DEFAULT_KIND)


def kind_settings() -> Kinds:
    """Return functions that import the settings' dataclass of each kind but `pairs`."""

    def settings(entry: str) -> type:
        kind: type[EngineKind] = import_entry(entry)
        return kind.settings

    return {
        name: partial(settings, entry) for name, entry in ENGINE_KINDS.items() if name != "pairs"
    }


def load_config(path: Path, environ: Mapping[str, str], *, with_keys: bool = True) -> Config:
    """Read the deployment at `path`, with settings of any engine kind; see `config.read_config`."""
    return read_config(path, environ, with_keys=with_keys, kinds=kind_settings())


def engine_kind(name: str) -> EngineKind:
    """Make the engine kind that a table lists under `name`."""
    kind: EngineKind = import_entry({**WINGS, **ENGINE_KINDS}[name])()
    return kind


def wing(name: str) -> Any:
    """Import the function that attaches a wing of the table."""
    return import_entry(WINGS[name])


def import_entry(entry: str) -> Any:
    """Import the object that an entry of these tables names."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)
