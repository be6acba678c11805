"""In which order what is asked with which seed: nothing here depends on what was answered."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from shell_router.evaluation.dataset import Item
from shell_router.evaluation.settings import Setting


@dataclass(frozen=True, slots=True)
class Round:
    """Questions that are asked at once, each with its seed, in one setting after the other."""

    asked: tuple[tuple[Item, int], ...]
    settings: tuple[Setting, ...]


def rounds_of(
    items: Sequence[Item], seeds: Sequence[int], settings: Sequence[Setting], *, at_once: int = 1
) -> list[Round]:
    """All rounds of `at_once` questions, every question once before the next seed begins.

    Each round begins with another setting than the one before: what comes first finds other caches and another machine
    than what comes last. No two settings are asked at once, so that none pays for what another one costs.
    """
    groups = [
        tuple((item, seed) for item in items[begin : begin + at_once])
        for seed in seeds
        for begin in range(0, len(items), at_once)
    ]
    return [Round(group, _rotated(settings, number)) for number, group in enumerate(groups)]


def _rotated(settings: Sequence[Setting], by: int) -> tuple[Setting, ...]:
    first = by % len(settings)
    return (*settings[first:], *settings[:first])


def request_seed(seed: int, question: int, member: int = 0) -> int:
    """The seed of one request, the same for all settings; the members of a vote have one each. Below 2^31."""
    return zlib.crc32(f"{seed}/{question}/{member}".encode()) >> 1
