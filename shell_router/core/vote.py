"""A vote: the plurality of what several members answered."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Vote = TypeVar("Vote", bound=Hashable)


def plurality(votes: Sequence[Vote | None]) -> int | None:
    """The place of the last vote for the winner; None where nobody votes.

    The winner is what most votes are for; of several such the one whose last vote stands last. None is no vote.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    return max((place for place, vote in enumerate(votes) if vote is not None and counts[vote] == most), default=None)
