"""Drafted decoding: guess the next tokens from a request's own text, and verify them in one pass.

An agent that reads others largely repeats what it read, so the tokens after the longest repeated
suffix are a good draft (prompt lookup decoding). Nothing here is random, and only the standard
library is imported: the embedded engine and the plugin in SGLang's processes both run it.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import cycle, islice, pairwise

WIDTHS = (1, 2, 4, 8, 16)
"""Tokens that a pass computes per request: the last certain one, and drafts."""
MOST_DRAFTED = WIDTHS[-1] - 1
MOST_SOURCES = 16
MOST_SOURCE_TOKENS = 8192
"""The most `sources` of a request, and the most tokens of all of them: a client chooses them."""

_SHORTEST_MATCH = 2
_LONGEST_MATCH = 16
_CANDIDATES = 16  # earlier places of a pair that are compared
_BREAK = -1  # between texts: no token has this id

_FADE = 0.9  # of the counts of earlier proposals, at each proposal
_PRIOR = 2.0, 1.0  # tokens accepted, drafts rejected


class Drafter:
    """Drafts for one request.

    A place is a position in the text. It is found by the two tokens before it, and linked to the
    last earlier place after the same two, as in LZ77: a token costs the same however long the
    prompt is.

    Args:
        prompt: Token ids.
        sources: Further texts that the output may repeat, such as a predicted answer. The first
            MOST_SOURCES of them, and MOST_SOURCE_TOKENS tokens, are used.
    """

    def __init__(self, prompt: Sequence[int], sources: Iterable[Sequence[int]] = ()) -> None:
        self._tokens: list[int] = []
        left = MOST_SOURCE_TOKENS
        for source in islice(sources, MOST_SOURCES):
            # after the prompt's last token: an output like it is matched from its second token
            self._tokens += (*prompt[-1:], *source[:left], _BREAK)
            left -= min(left, len(source))
        self._tokens += prompt
        self._latest: dict[tuple[int, int], int] = {}
        # per place: the place before it after the same two tokens, or 0
        self._before: list[int] = [0, 0]
        self._proposed: Sequence[int] = ()
        self._accepted, self._rejected = _PRIOR
        self._index()

    @property
    def acceptance(self) -> float:
        """The estimated share of drafted tokens that are right; the newest proposals count most."""
        return self._accepted / (self._accepted + self._rejected)

    def propose(self, most: int) -> Sequence[int]:
        """Return up to `most` tokens that may come next; none if the last two are new."""
        self._proposed = self._find_continuation(most) if most > 0 else ()
        return self._proposed

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the tokens that came next, and compare them with the last proposal."""
        if self._proposed:
            right = count_matching(self._proposed, tokens)
            self._accepted = _FADE * self._accepted + right
            self._rejected = _FADE * self._rejected + (
                right < min(len(self._proposed), len(tokens))
            )
            self._proposed = ()
        self._tokens += tokens

    def _find_continuation(self, most: int) -> Sequence[int]:
        tokens = self._tokens
        self._index()
        if len(tokens) < _SHORTEST_MATCH:
            return ()
        place = self._latest.get((tokens[-2], tokens[-1]), 0)
        best = 0
        longest = 0
        for _ in range(_CANDIDATES):
            if not place or longest == _LONGEST_MATCH:
                break
            length = self._match(place)
            if length > longest:
                best = place
                longest = length
            place = self._before[place]
        if not best:
            return ()
        draft = tokens[best : best + most]
        if _BREAK in draft:
            return draft[: draft.index(_BREAK)]
        # a repetition that reaches the end of the text is expected to go on
        if len(draft) == most:
            return draft
        return list(islice(cycle(draft), most))

    def _match(self, place: int) -> int:
        """Count the tokens before `place` that equal those at the end."""
        tokens = self._tokens
        length = _SHORTEST_MATCH
        most = min(_LONGEST_MATCH, place)
        while length < most and tokens[place - 1 - length] == tokens[-1 - length] != _BREAK:
            length += 1
        return length

    def _index(self) -> None:
        """Link the places that now have a token after them."""
        tokens = self._tokens
        latest = self._latest
        for place in range(len(self._before), len(tokens)):
            pair = tokens[place - 2], tokens[place - 1]
            self._before.append(latest.get(pair, 0))
            latest[pair] = place


def count_matching(proposed: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the leading tokens that are equal."""
    count = 0
    for guess, token in zip(proposed, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count


_WEIGHT = 0.2  # of the newest pass
_OUTLIER = 3.0  # times the mean: a slower pass counts as this
_FORGOTTEN_AFTER = 256  # passes
_FIRST_GUESS = 1.25  # of a plain pass's seconds: the narrowest drafted pass until measured
_MOST_SLOWDOWN = 1.5  # of a plain pass's seconds, where some requests of the batch gain nothing
_MOST_PASS_TOKENS = 256  # of all rows: each needs memory for its logits


class DraftGate:
    """Chooses the tokens per request of the next pass, for the most tokens per second.

    The cost of a pass is measured here, plain and drafted apart, by powers of two of the tokens
    that it computes. Wider passes are tried step by step, each estimated at the cost of the one
    before. Costs not seen for 256 passes are forgotten and measured anew. Without drafts every pass
    is plain. If some requests have none, a pass takes at most half as long again as a plain one. No
    pass is wider than `widest`.
    """

    def __init__(self, widest: int = WIDTHS[-1]) -> None:
        self._widest = widest
        # seconds, and the number of the pass that measured them
        self._costs: dict[tuple[bool, int], tuple[float, int]] = {}
        self._passes = 0

    def width(self, rows: int, drafts: Iterable[tuple[int, float]]) -> int:
        """Return one of `WIDTHS` for the next pass.

        Args:
            rows: The number of requests in the batch.
            drafts: Length and acceptance of each draft.
        """
        drafted = [(length, acceptance) for length, acceptance in drafts if length]
        plain_s = self._recall_s((False, _bucket(rows)))
        if not drafted or plain_s is None:
            return 1
        best = 1
        rate = rows / plain_s
        dearest_s = plain_s * (_MOST_SLOWDOWN if len(drafted) < rows else math.inf)
        times_s = {width: self._recall_s((True, _bucket(rows * width))) for width in WIDTHS[1:]}
        widest_known = max((width for width in times_s if times_s[width] is not None), default=1)
        pass_s = plain_s * _FIRST_GUESS
        for narrower, width in pairwise(WIDTHS):
            if (
                narrower > max(drafted)[0]
                or rows * width > _MOST_PASS_TOKENS
                or width > self._widest
            ):
                break
            pass_s = times_s[width] or pass_s
            gained = sum(
                _expect_accepted(min(length, width - 1), acceptance)
                for length, acceptance in drafted
            )
            if pass_s <= dearest_s and (rows + gained) / pass_s > rate:
                best = width
                rate = (rows + gained) / pass_s
            if width > widest_known:
                break  # a wider one is tried once this one is known
        return best

    def note(self, rows: int, width: int, seconds: float) -> None:
        """Update the cost of such passes with the measured seconds of one."""
        self._passes += 1
        key = width > 1, _bucket(rows * width)
        mean_s = self._recall_s(key)
        if mean_s is not None:
            seconds = mean_s + _WEIGHT * (min(seconds, _OUTLIER * mean_s) - mean_s)
        self._costs[key] = seconds, self._passes

    def _recall_s(self, key: tuple[bool, int]) -> float | None:
        seconds, seen = self._costs.get(key, (0.0, -_FORGOTTEN_AFTER))
        if self._passes - seen < _FORGOTTEN_AFTER:
            return seconds
        return None


def _bucket(tokens: int) -> int:
    return tokens.bit_length()


def _expect_accepted(length: int, acceptance: float) -> float:
    """Return the drafted tokens expected to be right: all up to the first wrong one."""
    if acceptance >= 1:
        return length
    return acceptance * (1 - acceptance**length) / (1 - acceptance)
