"""How often experts are needed, and after which others: from rules, or from a sample (CoServe, section 4.5)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shell_router.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests of this `chain` of experts are so large a `share` of all; shares count relative to their sum."""

    chain: tuple[str, ...]
    share: float

    def __post_init__(self) -> None:
        check_chain(self.chain)
        if not self.share > 0:
            raise ConfigError(f"share is {self.share}.", remedy="Give a number above 0.")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one expert: the probability that a request needs it, and the experts that it follows on."""

    probability: float
    after: frozenset[str]


def check_chain(chain: Sequence[str]) -> None:
    """Raises ConfigError for a chain that no request could have."""
    if not chain:
        raise ConfigError("A chain names no expert.", remedy="Name the first expert at least.")
    if len(set(chain)) < len(chain):
        raise ConfigError(f"A chain names an expert twice: {', '.join(chain)}.", remedy="Name each expert once.")


def rules_of(chains: Iterable[Sequence[str]]) -> list[Rule]:
    """A sample's chains as rules: each as often as it was seen."""
    return [Rule(chain, times) for chain, times in Counter(map(tuple, chains)).items()]


def usage_of(rules: Iterable[Rule]) -> Mapping[str, Usage]:
    """Of all experts that rules name. One that any chain begins with follows on nobody: it needs none loaded before."""
    rules = list(rules)
    whole = sum(rule.share for rule in rules)
    shares: dict[str, float] = defaultdict(float)
    after: dict[str, set[str]] = defaultdict(set)
    for rule in rules:
        for place, expert in enumerate(rule.chain):
            shares[expert] += rule.share / whole
            after[expert].update(rule.chain[place - 1 : place])
    first = {rule.chain[0] for rule in rules}
    return {
        expert: Usage(min(1.0, share), frozenset() if expert in first else frozenset(after[expert]))
        for expert, share in shares.items()
    }
