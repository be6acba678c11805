"""How probable each expert is, where nobody knows it beforehand: counted as requests come."""

from collections import Counter

REMEMBERED = 1000
"""Requests after which all counts are halved, so that what was asked long ago counts little."""


class CountedUsage:
    """Shares of the requests, those of late counting most."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._total = 0

    def asked(self, name: str) -> None:
        """A request wants this expert."""
        self._counts[name] += 1
        self._total += 1
        if self._total >= REMEMBERED:
            self._counts = Counter({name: count // 2 for name, count in self._counts.items() if count > 1})
            self._total = self._counts.total()

    def share(self, name: str) -> float:
        """The probability that a request wants it, as far as is known."""
        return self._counts[name] / self._total if self._total else 0.0
