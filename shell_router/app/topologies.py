"""The topologies of a deployment: read when it starts, and again when their files change."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from shell_router.api.live import LiveTopologies
from shell_router.app.model_files import model_names
from shell_router.config import Config
from shell_router.errors import ConfigError, TopologyError
from shell_router.telemetry import Metrics
from shell_router.topology import Catalog, Conditional, Graph, files_in
from shell_router.topology.document import Problem

log = logging.getLogger(__name__)


def load_topologies(config: Config) -> Mapping[str, Graph]:
    """Every topology that the deployment names, checked against its models. Raises ConfigError."""
    return _catalog(config).graphs_without("")


def _catalog(config: Config) -> Catalog:
    catalog = Catalog(model_names(config), partial(_lacks, config), config.live_topologies)
    return catalog.of_files(_files(config))


Contents = Mapping[Path, bytes | None]
"""What each file holds; None for one that cannot be read."""


def live_topologies(config: Config) -> tuple[LiveTopologies, Contents]:
    """The same, to be changed while the router runs, and what their files held. Raises ConfigError."""
    seen = _contents(config)
    return LiveTopologies(_catalog(config)), seen


@asynccontextmanager
async def watched(
    config: Config, topologies: LiveTopologies, seen: Contents, metrics: Metrics, *, look_s: float = 5.0
) -> AsyncIterator[None]:
    """While the context is open, files that differ from `seen` take effect, where the deployment wants that.

    Files are read every `look_s` at least: they may lie where the system reports no changes.
    """
    if not (config.live_topologies.watch and config.topologies):
        yield
        return
    await asyncio.to_thread(import_module, "watchfiles")  # takes 0.1 s
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it reports every change in the folders
    watching = asyncio.create_task(_watch(config, topologies, seen, metrics, look_s), name="watch-topologies")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def _watch(config: Config, topologies: LiveTopologies, seen: Contents, metrics: Metrics, look_s: float) -> None:
    """Reload when files have changed. What they hold decides, so that a report too many does nothing."""
    from watchfiles import awatch  # noqa: PLC0415 - routers without topology files watch nothing

    async def look() -> None:
        nonlocal seen
        found = await asyncio.to_thread(_contents, config)
        if found != seen:
            seen = found
            await _reload(config, topologies, metrics)

    while True:
        try:
            places = _places(config)
            changes = awatch(
                *places,
                watch_filter=None,
                debounce=int(look_s * 40),
                step=int(look_s * 10),
                rust_timeout=int(look_s * 1000),
                yield_on_timeout=True,
                recursive=False,
            )
            async with aclosing(changes):
                await look()
                async for _ in changes:
                    await look()
                    if places != _places(config):
                        break  # a link leads elsewhere now
        except (OSError, RuntimeError) as error:
            log.warning("topology files cannot be watched, and are read again in %g s: %s", look_s, error)
            await asyncio.sleep(look_s)


def _places(config: Config) -> set[Path]:
    """The folders to watch: what replaces a file, a folder or a link to it is seen in the folder that holds it."""
    named = {place for path in config.topologies for place in (path, path.absolute().parent)}
    return {place.resolve() for place in named if place.is_dir()}


async def _reload(config: Config, topologies: LiveTopologies, metrics: Metrics) -> None:
    wrong = await topologies.reload(partial(_present, config))
    for error in wrong:
        log.error("a topology file is wrong, and the version before stays: %s", error)
    metrics.topology_reloads.labels("invalid" if wrong else "loaded").inc()
    log.info("topologies were read again: %s", ", ".join(topologies) or "none is left")


def _contents(config: Config) -> Contents:
    return {file: content_of(file) for file in _present(config)}


def content_of(file: Path) -> bytes | None:
    """What the file holds; None where it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None


def _present(config: Config) -> Iterator[Path]:
    """The files that are there now."""
    for path in config.topologies:
        with suppress(TopologyError):  # removed just now
            yield from files_in(path) if path.is_dir() else [path] if path.exists() else ()


def _files(config: Config) -> list[Path]:
    for path in config.topologies:
        if not path.exists():
            raise ConfigError(
                f"topologies: there is no file or folder {path}.",
                remedy="Correct it; a relative path counts from the configuration's folder.",
            )
    return list(_present(config))


def _lacks(config: Config, topology: Graph) -> Iterator[Problem]:
    """What the topology needs and this deployment does not have."""
    if topology.embeds and config.embedder.model == "none":
        what = "has classifiers" if isinstance(topology, Conditional) and topology.classifiers else "exits early"
        yield Problem(
            (),
            f"embedder.model is none, and the topology {topology.name!r} {what}.",
            "Set embedder.model: default, or take out of the topology what has to embed:"
            " classifiers, and early_exit with another policy than in_flight.",
        )
    if isinstance(topology, Conditional) and topology.scored_models and config.prediction.scores is None:
        yield Problem(
            (),
            f"prediction.scores is not set, and a rule of the topology {topology.name!r} asks for score_below.",
            "Name a folder that `shell-router train router` wrote, or remove the rule.",
        )
