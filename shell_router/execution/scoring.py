"""How probably each model would answer a request rightly, as the deployment's trained router sees it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from shell_router.core.events import Event
from shell_router.core.model import ServedModel
from shell_router.core.prediction import Prospect
from shell_router.errors import ConfigError
from shell_router.execution.choosing import ModelChooser
from shell_router.execution.planning import LONG_TEXT
from shell_router.execution.prospects import KnownPrompt
from shell_router.execution.requests import MoaRequest

STAGE = "rules"
"""The stage of requests that rules are read for, in the words of predictors."""


class Scores:
    """Asks the predictors that `auto` is chosen by."""

    def __init__(self, chooser: ModelChooser, models: Mapping[str, ServedModel]) -> None:
        self._chooser = chooser
        self._models = models

    async def of(
        self, topology: str, request: MoaRequest, models: Sequence[str], emit: Callable[[Event], None]
    ) -> Mapping[str, float]:
        """The chances of `models`; those that nobody can tell are missing, and `emit` is told why where it is known.

        Raises ConfigError where there is no predictor.
        """
        if not self._chooser.predicts:
            raise ConfigError(
                f"Topology {topology!r} asks how probably {' or '.join(models)} would be right, which nobody predicts.",
                remedy="Set `prediction.scores` in the configuration, or remove `score_below`.",
            )
        known, tokenizer = KnownPrompt("", request.question, ""), self._models[models[0]].tokenizer
        long = known.characters > LONG_TEXT
        tokens = await asyncio.to_thread(known.tokens, tokenizer) if long else known.tokens(tokenizer)
        prospect = Prospect(
            topology, STAGE, known.user, tokens.system, tokens.user, tokens.known, tuple(models), scored=True
        )
        (found,) = await self._chooser.forecasts([prospect], emit)
        return found.scores
