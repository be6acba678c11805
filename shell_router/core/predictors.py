"""Protocols of the learned helpers that the router asks: the embedder, and the predictor of scores
and lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

TokenStates = NDArray[np.float32]
"""Last-layer hidden states of one text, shape [tokens, features]."""


class Embedder(Protocol):
    """Embeds whole texts into per-token states, off the event loop's thread."""

    async def embed(self, text: str) -> TokenStates:
        """Last-layer hidden states of `text`, shape [tokens >= 1, features]."""
        ...


@dataclass(frozen=True, slots=True)
class Prospect:
    """One agent that is about to run on one of `models`.

    `workflow` and `stage` say which place in which graph it has. `user` is the text of the client's
    question. The counts are tokens: of the system prompt, of the question, and of all that is known
    of the prompt before others have written. `scored` asks for scores, too: they are not needed
    where there is no choice.
    """

    workflow: str
    stage: str
    user: str
    system_tokens: int
    user_tokens: int
    known_tokens: int
    models: tuple[str, ...]
    scored: bool


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of one prospect, per model. A model that a mapping lacks is not predicted.

    `scores` are chances from 0 to 1 that the model answers rightly. `own_tokens` are output tokens
    of the agent itself, `total_tokens` of it and of all that follow it in its program, both
    medians.
    """

    scores: Mapping[str, float] = field(default_factory=dict)
    own_tokens: Mapping[str, float] = field(default_factory=dict)
    total_tokens: Mapping[str, float] = field(default_factory=dict)


NO_FORECAST = Forecast()

Prediction = Literal["scores", "lengths"]


@dataclass(frozen=True, slots=True)
class Forecasts:
    """One forecast per prospect, in order; `trouble` says why a kind of prediction is missing from
    all of them.
    """

    each: Sequence[Forecast]
    trouble: Mapping[Prediction, str] = field(default_factory=dict)


class Predictor(Protocol):
    """Looks ahead."""

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        """Takes at most the predictor's time limit, and raises nothing: `trouble` says what is
        missing.
        """
        ...
