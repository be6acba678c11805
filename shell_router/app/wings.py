"""The wings that a deployment can ask for. Each is imported when it is first asked for, never
before.

A new engine kind is one class with the shape of `EngineKind`, and one entry in `ENGINE_KINDS`.
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
from shell_router.core.engine import Engine
from shell_router.core.predictors import Predictor

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from shell_router.engines.sglang import SglangPair

ENGINE_KINDS: Mapping[str, str] = {
    "pairs": "shell_router.app.models:SglangPairs",
    "embedded": "shell_router.standins.embedded.kind:Embedded",
}
"""By the setting of a model that asks for it, as in `models.small.embedded`."""
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
    """The engine of one model, ready to serve.

    `name` says what it is, `batch_size` how many sequences it decodes together. `restarts` counts,
    by name, how often each of its processes was started again. `pairs` has the SGLang servers of
    models that take turns: those that sleep by model, those whose weights are swapped by number.
    `metrics` are those of all models that take turns with it.
    """

    engine: Engine
    name: str
    batch_size: int
    restarts: Callable[[], Mapping[str, int]] = dict
    pairs: Mapping[str, "SglangPair"] = field(default_factory=dict)
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
