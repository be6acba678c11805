"""Protocols of learned helpers: the embedder, and the predictor of scores and lengths."""

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
        """Return the last-layer hidden states of `text`, shape [tokens >= 1, features]."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """An agent that is about to run on one of `models`.

    Attributes:
        workflow: The graph.
        stage: The agent's place in the graph.
        user: The text of the client's question.
        system_tokens: Tokens of the system prompt.
        user_tokens: Tokens of the question.
        known_tokens: Tokens of the prompt without other agents' outputs.
        scored: Whether scores are needed; they are not without a choice.
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
    """Expectations of one prospect, per model; models without a prediction are missing.

    Attributes:
        scores: Chances in [0, 1] that the model answers rightly.
        own_tokens: Median output tokens of the agent.
        total_tokens: Median output tokens of the agent and all that follow it in its program.
    """

    scores: Mapping[str, float] = field(default_factory=dict)
    own_tokens: Mapping[str, float] = field(default_factory=dict)
    total_tokens: Mapping[str, float] = field(default_factory=dict)


NO_FORECAST = Forecast()

Prediction = Literal["scores", "lengths"]


@dataclass(frozen=True, slots=True)
class Forecasts:
    """A forecast per prospect, in order.

    `trouble` says why a kind of prediction is missing from all of them.
    """

    each: Sequence[Forecast]
    trouble: Mapping[Prediction, str] = field(default_factory=dict)


class Predictor(Protocol):
    """Predicts scores and lengths."""

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        """Predict within the predictor's time limit.

        It raises no error: `trouble` says what is missing.
        """
