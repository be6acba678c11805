"""Decide when a prefill-only update pays, and in which order slots are filled.

Pure: times and counts come from the caller. An update moves work forward and adds some. Each new
token takes c seconds, which would be spent anyway; a request and a pass over the weights take f
seconds, whatever it holds. So an update pays only if the time that it hides is worth more than f
and the delay of the prompts behind it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shell_router.core.engine import UNSTREAMED_INTERVAL, PrefillCost

SlotOrder = Literal["declared", "expected_finish"]
ChunkTokens = int | Literal["adaptive"]


def order_slots(
    precursors: Sequence[str], order: SlotOrder, expected_finish_s: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the precursors in the order in which their outputs stand in the prompt.

    With `expected_finish` the precursor expected to end first comes first, so a slow one does not
    hold back the slots behind it. A precursor without an estimate keeps its declared place among
    the last.
    """
    if order == "declared":
        return tuple(precursors)
    return tuple(sorted(precursors, key=lambda agent: expected_finish_s.get(agent, float("inf"))))


# --- what an engine's prefill costs, and how busy it is

UNMEASURED = PrefillCost(fixed_s=0.03, token_s=0.0003)
"""The cost for engine kinds that measure none at their start: an update of 100 tokens pays, until
updates are measured.
"""

_WEIGHT = 0.05  # of the newest sample: about the last twenty count
_PRIOR_TOKENS = 256
_PRIOR_WEIGHT = 2.0  # samples that each end of the prior's line counts for
_LEAST_SHARE = 0.1  # of the prior's terms that a fitted line may have
_WINDOW_S = 30.0
_LEAST_IDLE = 0.05
_FIXED_PARTS = 3.0  # k of tokens_until_due


class MeasuredCost:
    """A line through the newest samples of an idle engine and through the prior.

    The prior is scaled to the samples' level. So samples of one size are enough to follow an engine
    whose speed changes, and samples of several sizes tell the two terms of the cost.
    """

    def __init__(self, prior: PrefillCost) -> None:
        self._prior = prior
        self._count = self._tokens = self._seconds = self._squares = self._products = 0.0
        self.cost = prior

    def add(self, new_tokens: int, seconds: float) -> None:
        """Add a sample of an idle engine: the prefill of `new_tokens` took `seconds`."""
        keep = 1 - _WEIGHT
        prior = self._prior
        seconds = min(seconds, 2 * self.cost.seconds(new_tokens))
        self._count = keep * self._count + 1
        self._tokens = keep * self._tokens + new_tokens
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + new_tokens**2
        self._products = keep * self._products + new_tokens * seconds
        stretch = self._seconds / (prior.fixed_s * self._count + prior.token_s * self._tokens)
        fixed_s = stretch * prior.fixed_s
        token_s = stretch * prior.token_s
        count = self._count + 2 * _PRIOR_WEIGHT
        mean = (self._tokens + _PRIOR_WEIGHT * _PRIOR_TOKENS) / count
        mean_s = (self._seconds + _PRIOR_WEIGHT * (2 * fixed_s + _PRIOR_TOKENS * token_s)) / count
        squares = self._squares + _PRIOR_WEIGHT * _PRIOR_TOKENS**2
        products = self._products + _PRIOR_WEIGHT * _PRIOR_TOKENS * (
            fixed_s + _PRIOR_TOKENS * token_s
        )
        slope = (products - count * mean * mean_s) / (squares - count * mean**2)
        slope = max(slope, _LEAST_SHARE * token_s)
        self.cost = PrefillCost(max(mean_s - slope * mean, _LEAST_SHARE * fixed_s), slope)


@dataclass(slots=True, eq=False)
class Prefilling:
    """A prompt, or an update of one, that was sent and is not prefilled yet."""

    new_tokens: int
    seconds: float
    began_s: float


class PrefillLoad:
    """The prefill servers of one model: measured costs, outstanding work, and the rate of prompts.

    It knows the requests of this router only. `new_tokens` of a prompt are those not sent as
    updates before.
    """

    def __init__(self, prior: PrefillCost | None = None, servers: int = 1) -> None:
        self._measured = MeasuredCost(prior or UNMEASURED)
        self.servers = servers
        self._outstanding_s = 0.0
        self._under_way = 0
        self._alone: Prefilling | None = None
        self._per_s = self._busy = self._seen_s = 0.0

    @property
    def cost(self) -> PrefillCost:
        """Seconds of an update on an idle server."""
        return self._measured.cost

    @property
    def outstanding_s(self) -> float:
        """V: seconds of work that wait on a server."""
        return self._outstanding_s / self.servers

    def begin(self, now_s: float, new_tokens: int, *, update: bool) -> Prefilling:
        """Count a prompt or update that is sent; `end` must follow."""
        cost = self._measured.cost
        work = Prefilling(new_tokens, cost.fixed_s + cost.token_s * new_tokens, now_s)
        self._alone = None if self._under_way else work
        self._under_way += 1
        self._outstanding_s += work.seconds
        if not update:
            self._fade(now_s)
            self._per_s += 1 / _WINDOW_S
            self._busy += work.seconds / _WINDOW_S
        return work

    def end(self, work: Prefilling, now_s: float, computed: int | None = None) -> None:
        """Count the work as prefilled or given up.

        If `computed` tokens were not cached, by the engine's answer, and nothing else was under
        way, the work is a sample of an idle engine.
        """
        self._under_way -= 1
        if self._under_way:
            self._outstanding_s = max(0.0, self._outstanding_s - work.seconds)
        else:
            self._outstanding_s = 0.0
        if self._alone is work:
            self._alone = None
            if computed is not None:
                self._measured.add(computed, now_s - work.began_s)

    def estimate_delayed(self, now_s: float, seconds: float) -> float:
        """Return lambda (V + seconds) / (1 - rho), the prompts expected to wait for an update."""
        self._fade(now_s)
        idle = max(_LEAST_IDLE, 1 - self._busy / self.servers)
        return self._per_s / self.servers * (self.outstanding_s + seconds) / idle

    def _fade(self, now_s: float) -> None:
        keep = math.exp((self._seen_s - now_s) / _WINDOW_S)
        self._per_s *= keep
        self._busy *= keep
        self._seen_s = now_s


# --- when an update is due


@dataclass(frozen=True, slots=True)
class Remainder:
    """The rest of a growing prompt.

    Attributes:
        tokens: Tokens that its slowest precursor is still expected to write.
        token_s: Seconds per token of that precursor; None until measured.
        survives: The chance that the prompt, with its slots as they are, is decoded at all.
    """

    tokens: float
    token_s: float | None = None
    survives: float = 1.0


def tokens_until_due(load: PrefillLoad, now_s: float, unsent: int, rest: Remainder) -> int:
    """Decide whether an update of the `unsent` tokens pays now.

    With f and c of `PrefillCost`, u unsent tokens and n left to write in T seconds, on a server
    with V seconds of work:

        G = min(c u, T - V - f) * min(1, u / 2n) * P(survives)
        K = f * (k + lambda (V + f + c u) / (1 - rho)) + (1 - P(survives)) c u

    An update is due if c u > k f and G > K. No more is gained than can be computed before the
    precursors end; u / 2n is the chance that they end before as many tokens have come again. The
    fixed part counts k = 3 times, because engines may share cores with decoding and all costs are
    estimates, and once more for every prompt that waits behind it. On an idle server G = K is the
    economic order quantity, u = sqrt(2 k n f / c).

    Returns:
        0 if it pays, else the number of tokens to wait for before asking again.
    """
    cost = load.cost
    least = fewest_tokens(cost)
    if unsent < least:
        return max(1, math.ceil((least - unsent) / 2))
    moved_s = cost.token_s * unsent
    left = max(1.0, rest.tokens)
    if rest.token_s is None:
        time_s = math.inf
    else:
        time_s = left * rest.token_s - load.outstanding_s - cost.fixed_s
    gain_s = min(moved_s, time_s) * min(1.0, unsent / (2 * left)) * rest.survives
    delayed = load.estimate_delayed(now_s, cost.seconds(unsent))
    if gain_s > cost.fixed_s * (_FIXED_PARTS + delayed) + (1 - rest.survives) * moved_s:
        return 0
    return max(
        1, math.ceil(min(unsent, left) / 2)
    )  # the tokens left shrink meanwhile: half of the way, then anew


def fewest_tokens(cost: PrefillCost) -> float:
    """Return the size from which an update can pay."""
    return _FIXED_PARTS * cost.fixed_s / cost.token_s


_MOST_TOKENS_PER_EVENT_JUDGED = 4


def tokens_per_event(fewest_wanted: float | None, *, judged: bool) -> int:
    """Return how many tokens of a precursor share an event (SGLang's `stream_interval`).

    Args:
        fewest_wanted: The smallest update that a reader sends; None if none sends any.
        judged: Whether the precursor is judged in flight, so that tokens must come sooner.
    """
    if judged:
        return _MOST_TOKENS_PER_EVENT_JUDGED
    if fewest_wanted is None:
        return UNSTREAMED_INTERVAL
    return int(min(max(fewest_wanted, _FEWEST_TOKENS_PER_EVENT), UNSTREAMED_INTERVAL))


_FEWEST_TOKENS_PER_EVENT = 8
