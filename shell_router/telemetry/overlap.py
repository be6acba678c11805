"""How much of an agent's prefill was hidden behind its precursors' decoding."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """`hidden_s`: time of prefill-only updates spent while inputs were still being written.

    `exposed_s`: from the last input's end to the first decoded token, which nothing hides: what is left of
    the prefill, the queue, and the KV transfer.
    """

    hidden_s: float
    exposed_s: float

    @property
    def overlap_share(self) -> float | None:
        """Hidden part of the whole; None when nothing was prefilled."""
        total = self.hidden_s + self.exposed_s
        return self.hidden_s / total if total > 0 else None


def prefill_times(updates: Iterable[tuple[float, float]], inputs_done_s: float, first_token_s: float) -> PrefillTimes:
    """Times of one agent whose prefill-only updates ran over the (start, end) seconds in `updates`."""
    hidden = sum(max(0.0, min(end, inputs_done_s) - start) for start, end in updates)
    return PrefillTimes(hidden, max(0.0, first_token_s - inputs_done_s))


def summed(times: Iterable[PrefillTimes]) -> PrefillTimes:
    """Both times added up over agents."""
    listed = tuple(times)
    return PrefillTimes(sum(t.hidden_s for t in listed), sum(t.exposed_s for t in listed))


def critical_path(root: str, precursors: Mapping[str, Sequence[str]], ended_s: Mapping[str, float]) -> tuple[str, ...]:
    """From a leaf to `root`, the precursor that ended last at each step: the chain that set the latency."""
    path = [root]
    while last := [agent for agent in precursors.get(path[-1], ()) if agent in ended_s]:
        path.append(max(last, key=ended_s.__getitem__))
    return tuple(reversed(path))
