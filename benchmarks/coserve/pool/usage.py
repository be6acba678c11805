"""Which component follows on which, and how often each is needed, by rules or a sample of chains.

CoServe, sections 2.1, 4.3 and 4.5.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from shell_router.errors import require


@dataclass(frozen=True, slots=True)
class ChainRule:
    """Requests of this `chain` of components are so large a `share` of all; shares count relative
    to their sum.
    """

    chain: Annotated[tuple[str, ...], "Components in order."]
    share: Annotated[float, Gt(0), "Share of requests, relative to the sum."]

    def __post_init__(self) -> None:
        check_chain(self.chain)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one component: the probability that a request needs it, and the components that it follows
    on.
    """

    probability: float
    after: frozenset[str]


def check_chain(chain: Sequence[str]) -> None:
    """Raises ConfigError for a chain that no request could have."""
    require(bool(chain), "A chain names no component.", "Name the first component at least.")
    distinct = len(set(chain)) == len(chain)
    require(
        distinct,
        f"A chain names a component twice: {', '.join(chain)}.",
        "Name each component once.",
    )


def rules_of(chains: Iterable[Sequence[str]]) -> list[ChainRule]:
    """A sample's chains as rules: each as often as it was seen."""
    return [ChainRule(chain, times) for chain, times in Counter(map(tuple, chains)).items()]


def usage_of(rules: Iterable[ChainRule]) -> Mapping[str, Usage]:
    """Of all components that rules name. One that any chain begins with follows on none."""
    rules = list(rules)
    whole = sum(rule.share for rule in rules)
    shares: dict[str, float] = defaultdict(float)
    after: dict[str, set[str]] = defaultdict(set)
    for rule in rules:
        for place, component in enumerate(rule.chain):
            shares[component] += rule.share / whole
            after[component].update(rule.chain[place - 1 : place])
    first = {rule.chain[0] for rule in rules}
    return {
        component: Usage(
            min(1.0, share), frozenset() if component in first else frozenset(after[component])
        )
        for component, share in shares.items()
    }
