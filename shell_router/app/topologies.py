"""The topologies of a deployment: read at its start, and again when their files change."""

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from shell_router.api.live import LiveTopologies
from shell_router.app.rereads import Contents, Reread, read_contents
from shell_router.config import Config
from shell_router.errors import ConfigError, TopologyError
from shell_router.files.document import Problem
from shell_router.telemetry import Metrics
from shell_router.topology import Catalog, Conditional, Graph, Topology, files_in

log = logging.getLogger(__name__)


def load_topologies(config: Config) -> Mapping[str, Graph]:
    """Read every topology of the deployment, checked against its models; raises ConfigError."""
    return _catalog(config).graphs_without("")


def _catalog(config: Config) -> Catalog:
    catalog = Catalog(config.model_names, partial(_lacks, config), config.live_topologies)
    return catalog.of_files(_files(config))


def live_topologies(config: Config) -> tuple[LiveTopologies, Contents]:
    """Read the topologies to be changed while the router runs, and the content of their files.

    Raises ConfigError.
    """
    seen = read_contents(partial(_present, config))
    return LiveTopologies(_catalog(config)), seen


@asynccontextmanager
async def watch_topologies(
    config: Config,
    topologies: LiveTopologies,
    seen: Contents,
    metrics: Metrics,
    *,
    look_s: float = 1.0,
) -> AsyncIterator[None]:
    """Read changed files again while the context is open, if the deployment wants that.

    `seen` is the content of the files so far.
    """

    async def reload() -> None:
        before = set(topologies)
        wrong = await topologies.reload(partial(_present, config))
        for name in before.difference(topologies):
            metrics.drop_target(name)
        for error in wrong:
            log.error("a topology file is wrong, and the version before stays: %s", error)
        metrics.topology_reloads.labels("invalid" if wrong else "loaded").inc()
        log.info("topologies were read again: %s", ", ".join(topologies) or "none is left")

    if not (config.live_topologies.watch and config.topologies):
        yield
        return
    async with Reread("topologies", partial(_present, config), reload, seen).watch(look_s):
        yield


def _present(config: Config) -> Iterator[Path]:
    """Yield the files that exist now."""
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
    """Yield the topology's needs that this deployment does not meet."""
    if topology.embeds and config.embedder.model == "none":
        if isinstance(topology, Conditional) and topology.classifiers:
            what = "has classifiers"
        else:
            what = "exits early"
        yield Problem(
            (),
            f"embedder.model is none, and the topology {topology.name!r} {what}.",
            "Set embedder.model: default, or take out of the topology what has to embed:"
            " classifiers, and early_exit with another policy than in_flight.",
        )
    for part in topology.parts:
        yield from _lacks_confidence(config, part)
    if (
        isinstance(topology, Conditional)
        and topology.scored_models
        and config.prediction.scores is None
    ):
        yield Problem(
            (),
            f"prediction.scores is not set, and a rule of the topology {topology.name!r} asks "
            "for score_below.",
            "Name a folder that `shell-router train router` wrote, or remove the rule.",
        )


def _lacks_confidence(config: Config, topology: Topology) -> Iterator[Problem]:
    """Yield the agents whose confidence is compared, on models whose servers give none."""
    compared = {
        name
        for cluster in topology.clusters
        if cluster.early_exit is not None and cluster.early_exit.needs.judges
        for name in cluster.agents
    }
    for agent in topology.agents.values():
        if agent.votes == "confidence":
            compared.update(agent.voters)
    for name in sorted(compared):
        agent = topology.agents[name]
        for model in (agent.model, *agent.candidates, *agent.fallbacks):
            section = config.models[model].engine.get("openai") if model in config.models else None
            if section is not None and not section.logprobs:
                yield Problem(
                    (),
                    f"the confidence of agent {name!r} of {topology.name!r} is compared with "
                    f"others', and the server of {model!r} gives none.",
                    f"Set models.{model}.openai.logprobs if it gives log-probabilities, or choose "
                    "early_exit with policy quorum, or vote: majority.",
                )
