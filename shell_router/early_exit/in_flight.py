"""Early exit judged on outputs in flight, once enough of a cluster supports the leading answer.

The paper's gate sees completed outputs only. The in-flight gate also reads what the unfinished
agents have written so far. It needs no embedding model and costs a few operations per word.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from shell_router.early_exit.algorithm1 import Features, Score, rms_confidence
from shell_router.early_exit.answers import AnswerReader, Stated, normalize_answer
from shell_router.early_exit.gate import Judgement

_BLANKS = re.compile(r"\s+")

NO_QUORUM = Score(confidence=0.0, agreement=0.0, balance=0.0, probability=0.0)


class Overlap:
    """The words that an unfinished text shares with a complete one, in any order."""

    __slots__ = ("_left", "_matched", "_seen", "_size")

    def __init__(self, complete: Collection[str]) -> None:
        self._left = Counter(complete)
        self._size = len(complete)
        self._seen = self._matched = 0

    def add(self, words: Iterable[str]) -> None:
        """Count further words of the unfinished text."""
        for word in words:
            self._seen += 1
            if self._left[word] > 0:
                self._left[word] -= 1
                self._matched += 1

    @property
    def value(self) -> float:
        """The shared words over the words of the longer text, in [0, 1]; 0 without words."""
        return self._matched / max(self._seen, self._size, 1)


class _OpenOutput:
    """An agent's output so far."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.answer: str | None = None
        self._stated: Stated | None = None
        self.confidence = 0.0
        self.complete = False
        self.overlaps: dict[str, Overlap] = {}
        self._reader = AnswerReader()
        self._word: list[str] = []

    def write(self, text: str) -> None:
        """Take in more text.

        The last word may still grow, so it is not counted yet. An answer counts once its line has
        ended.
        """
        self._reader.add(text)
        self._set_stated(self._reader.stated)
        first, *others = _BLANKS.split(text)
        self._word.append(first)
        if others:
            *whole, last = ["".join(self._word), *others]
            self._word = [last]
            self._take([word for word in whole if word])

    def end(self) -> None:
        """Take in the end of the text."""
        self._set_stated(self._reader.end())
        self._take("".join(self._word).split())
        self.complete = True
        self.overlaps.clear()

    def compare(self, answer: str, complete: "_OpenOutput") -> None:
        """Count the words shared with `complete`, which states `answer`, now and in later text."""
        overlap = Overlap(complete.words)
        self.overlaps[answer] = overlap
        overlap.add(self.words)

    def _set_stated(self, stated: Stated | None) -> None:
        if stated is not self._stated:
            self._stated = stated
            if stated is None:
                self.answer = None
            else:
                self.answer = normalize_answer(stated.value)

    def _take(self, words: list[str]) -> None:
        self.words += words
        for overlap in self.overlaps.values():
            overlap.add(words)


class InFlightGate:
    """Exit when the leading answer's support reaches the threshold.

    Args:
        members: The ids of the cluster's agents.
        quorum: The least number of outputs that state the leading answer.
        threshold: The support at which the cluster exits, in [0, 1].
    """

    def __init__(self, members: Iterable[str], *, quorum: int, threshold: float) -> None:
        self._quorum = quorum
        self._threshold = threshold
        self._members = {name: _OpenOutput() for name in members}
        self._ended: set[str] = set()

    def add_text(self, agent: str, text: str, confidence: float) -> None:
        """See `Gate.add_text`."""
        member = self._members[agent]
        member.confidence = confidence
        member.write(text)

    def add_output(
        self, agent: str, text: str, confidence: float, features: Features | None
    ) -> None:
        """End the output; if it is the first with its answer, compare unfinished ones with it."""
        ended = self._members[agent]
        ended.end()
        if ended.answer is None or ended.answer in self._ended:
            return
        self._ended.add(ended.answer)
        for other in self._members.values():
            if not other.complete:
                other.compare(ended.answer, ended)

    def judge(self, running: Collection[str], draw: Callable[[], float]) -> Judgement:
        """Decide; the sources are the complete outputs that state the leading answer."""
        scored = self.score(running)
        answer = _find_leading_answer(self._list_judged(running))
        if scored is NO_QUORUM or scored.probability < self._threshold:
            return Judgement(False, scored, self._threshold, answer=answer)
        stating = [
            name
            for name, member in self._members.items()
            if member.complete and member.answer == answer
        ]
        stating.sort(key=lambda name: self._members[name].confidence, reverse=True)
        return Judgement(True, scored, self._threshold, tuple(stating), answer)

    def _list_judged(self, running: Collection[str]) -> list[_OpenOutput]:
        """Return the members that have completed or are running, which leaves out failed ones."""
        return [
            member for name, member in self._members.items() if member.complete or name in running
        ]

    def score(self, running: Collection[str]) -> Score:
        """Compute the leading answer's support among completed members and those in `running`.

        Member i supports it by s_i: 1 where it states the answer; 0 where it states another, or
        ended without one; else its overlap with the first completed output that states the answer.
        C_i is its confidence so far. The score's `probability` is the mean of C_i s_i over these
        members, `agreement` the mean of s_i, `confidence` the root mean square of the C_i of those
        that state the answer, and `balance` 1.

        All are 0 while fewer than the quorum state the answer, and while no output that states it
        is complete: the successor needs one to read.
        """
        members = self._list_judged(running)
        answer = _find_leading_answer(members)
        stating = [member.confidence for member in members if member.answer == answer]
        if answer is None or answer not in self._ended or len(stating) < self._quorum:
            return NO_QUORUM
        agreeing = [_weigh_support(member, answer) for member in members]
        support = sum(s * member.confidence for s, member in zip(agreeing, members, strict=True))
        return Score(
            confidence=rms_confidence(stating),
            agreement=sum(agreeing) / len(members),
            balance=1.0,
            probability=support / len(members),
        )


def _find_leading_answer(members: Sequence[_OpenOutput]) -> str | None:
    """Return the answer with the largest sum of confidences; None if none is stated."""
    sums: dict[str, float] = {}
    for member in members:
        if member.answer is not None:
            sums[member.answer] = sums.get(member.answer, 0.0) + member.confidence
    return max(sums, key=sums.__getitem__, default=None)


def _weigh_support(member: _OpenOutput, answer: str) -> float:
    if member.answer is not None or member.complete:
        return float(member.answer == answer)
    return member.overlaps[answer].value
