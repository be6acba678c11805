"""The cheapest arrangement of engine pairs that answers fast enough."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shell_router.errors import ConfigError
from shell_router.simulation.load import Loaded
from shell_router.simulation.run import simulate
from shell_router.simulation.summary import Summary, summary_of

ENGINES_PER_PAIR = 2


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Pairs per model, the GPUs they take, and what came of it; None where no request was answered."""

    pairs: Mapping[str, int]
    gpus: int
    summary: Summary | None

    def meets(self, p95_s: float) -> bool:
        """Whether every request was answered, nineteen of twenty within `p95_s`."""
        return self.summary is not None and not self.summary.failed and self.summary.p95_s <= p95_s


def arranged(loaded: Loaded, most_gpus: int, p95_s: float, seed: int = 0) -> Iterator[Arrangement]:
    """Arrangements of at most `most_gpus`, simulated from the cheapest on, up to the first that meets `p95_s`.

    Of those that take equally many GPUs all are tried. `loaded` has one topology. Raises ConfigError where the GPUs are
    too few for a pair of every model.
    """
    simulation, (topology,) = loaded.simulation, loaded.topologies.values()
    asked = {agent.model for agent in topology.agents.values()}
    simulation = replace(simulation, models={name: one for name, one in simulation.models.items() if name in asked})
    prices = {model: ENGINES_PER_PAIR * loaded.gpus_per_engine[model] for model in simulation.models}
    if sum(prices.values()) > most_gpus:
        raise ConfigError(
            f"{most_gpus} GPUs are too few for a pair of every model.", remedy=f"Allow {sum(prices.values())} or more."
        )
    by_price: dict[int, list[Mapping[str, int]]] = {}
    for pairs in _choices(prices, most_gpus):
        by_price.setdefault(sum(prices[model] * number for model, number in pairs.items()), []).append(pairs)
    for gpus in sorted(by_price):
        tried = []
        for pairs in by_price[gpus]:
            models = {name: replace(model, pairs=pairs[name]) for name, model in simulation.models.items()}
            done = simulate(replace(simulation, models=models), topology, loaded.costs, seed)
            tried.append(Arrangement(pairs, gpus, summary_of(done) if done.answered else None))
            yield tried[-1]
        if any(one.meets(p95_s) for one in tried):
            return


def cheapest(tried: Sequence[Arrangement], p95_s: float) -> Arrangement | None:
    """Of those that meet `p95_s` the one with the fewest GPUs, and of equals the fastest."""
    met = [
        (one.gpus, one.summary.p95_s, number) for number, one in enumerate(tried) if one.summary and one.meets(p95_s)
    ]
    return tried[min(met)[2]] if met else None


def _choices(prices: Mapping[str, int], most: int) -> Iterator[Mapping[str, int]]:
    """Every number of pairs per model, one at least, that `most` GPUs hold."""
    spare = most - sum(prices.values())
    ranges = [range(1, 2 + spare // price) for price in prices.values()]
    for numbers in product(*ranges):
        pairs = dict(zip(prices, numbers, strict=True))
        if sum(prices[model] * number for model, number in pairs.items()) <= most:
            yield pairs
