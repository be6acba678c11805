"""Prospects and answers on their way to a prediction process and back, as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import orjson

from shell_router.core.prediction import Prospect

Answers = Sequence[Mapping[str, Mapping[str, float]]]
"""Per prospect, by kind ("scores", "own_tokens", "total_tokens"), per model."""


def packed_prospects(prospects: Sequence[Prospect]) -> bytes:
    """A question's body."""
    return orjson.dumps([asdict(one) for one in prospects])


def unpacked_prospects(body: bytes) -> list[Prospect]:
    """The prospects of a question."""
    return [Prospect(**{**one, "models": tuple(one["models"])}) for one in orjson.loads(body)]


def packed_answers(answers: Answers) -> bytes:
    """An answer's body."""
    return orjson.dumps(answers)


def unpacked_answers(body: bytes | bytearray) -> Answers:
    """What a process answered."""
    found: Answers = orjson.loads(body)
    return found
