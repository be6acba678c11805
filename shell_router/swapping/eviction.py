"""The models that take turns, and the order in which they are unloaded (CoServe, section 4.3)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shell_router.swapping.turns import LoadedModel
from shell_router.topology import Graph


@dataclass(frozen=True, slots=True)
class ModelInTurn:
    """A model that takes turns with others.

    `usage` is the share of requests that ask for it. It only ever reads outputs of the models
    `after`; a model without any also answers clients' prompts.
    """

    name: str
    weight_bytes: int
    usage: float = 0.0
    after: frozenset[str] = frozenset()


def models_in_turn(
    folders: Mapping[str, Path], graphs: Iterable[Graph], usage: Mapping[str, float]
) -> Mapping[str, ModelInTurn]:
    """Describe the models in `folders` by alias; reads the sizes of their files.

    A model comes after others if it only reads their outputs in all of `graphs`.
    """
    precursors: dict[str, set[str]] = {alias: set() for alias in folders}
    first = set()
    for graph in graphs:
        for agent, waits_for in graph.waits_for.items():
            model = graph.agents[agent].model
            if not waits_for:
                first.add(model)
            read = {graph.agents[precursor].model for precursor in waits_for}
            precursors.setdefault(model, set()).update(read)
    models = {}
    for alias, folder in folders.items():
        after: set[str] = set()
        if alias not in first:
            after = precursors[alias] & folders.keys() - {alias}
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        weight_bytes = sum(sizes) or 1
        models[alias] = ModelInTurn(alias, weight_bytes, usage.get(alias, 0.0), frozenset(after))
    return models


@dataclass(frozen=True, slots=True)
class Eviction:
    """The order in which models are unloaded.

    Models that no request waits for leave first: those that read only models that are not loaded,
    the largest first, then the least used. Models that requests wait for follow, the last of the
    queue first. Of equals, the least recently used leaves.
    """

    catalog: Mapping[str, ModelInTurn]

    def __call__(
        self, loaded: Sequence[LoadedModel], turns: Mapping[str, int]
    ) -> Sequence[LoadedModel]:
        """Sort `loaded`; `turns` has the position of each awaited model in the queue."""
        names = {candidate.name for candidate in loaded}

        def rank(candidate: LoadedModel) -> tuple[int, float, int]:
            model = self.catalog[candidate.name]
            turn = turns.get(candidate.name)
            if turn is not None:
                return 2, -turn, candidate.used
            if model.after and not model.after & names:
                return 0, -model.weight_bytes, candidate.used
            return 1, model.usage, candidate.used

        return sorted(loaded, key=rank)
