"""Prefill-only updates of one growing prompt (Faster-MoA, 4.3)."""

import logging
from collections.abc import Callable

from shell_router.core.events import Degraded, Event, PrefillIncrement
from shell_router.core.generation import Generation
from shell_router.core.hints import Hints
from shell_router.core.model import ServedModel
from shell_router.errors import EngineError, PromptTooLong
from shell_router.execution.pace import Pace

log = logging.getLogger(__name__)


class PrefillUpdates:
    """Sends a prompt's ids as they grow, one update at a time. `sent` is what the last one held."""

    def __init__(
        self,
        agent: str,
        rid: str,
        model: ServedModel,
        hints: Hints,
        pace: Pace,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._agent = agent
        self._rid = rid
        self._model = model
        self._hints = hints
        self._pace = pace
        self._emit = emit
        self._clock = clock
        self._count = 0
        self._refused = False
        self.sent: list[int] = []

    async def send(self, ids: list[int], slot: str | None) -> None:
        """Have `ids` prefilled, if they hold anything new.

        Nothing is sent that the model could not take (the complete prompt will be refused by name), nor after the
        engine refused an update: that costs only the overlap, and is told in a warning and an event.
        """
        resident = common_prefix(self.sent, ids)
        if resident == len(ids) or self._refused or len(ids) >= self._model.context_length:
            return
        started_s = self._clock()
        request = Generation(f"{self._rid}.p{self._count}", ids, affinity=self._rid, hints=self._hints)
        self._count += 1
        try:
            done = await self._model.engine.prefill(request)
        except (EngineError, PromptTooLong) as error:
            self._refused = True
            log.warning("agent %s goes on without incremental prefill: %s", self._agent, error)
            self._emit(Degraded(self._clock(), self._agent, "increment", str(error)))
            return
        now_s = self._clock()
        new_tokens = done.prompt_tokens - done.cached_tokens
        self._pace.observe_update(self._model.alias, new_tokens, now_s - started_s)
        self._emit(
            PrefillIncrement(now_s, self._agent, started_s, slot, done.prompt_tokens, done.cached_tokens, resident)
        )
        self.sent = ids


def common_prefix(before: list[int], now: list[int]) -> int:
    """Length of the common prefix; comparing whole slices first keeps the usual cases fast."""
    if now[: len(before)] == before:
        return len(before)
    if before[: len(now)] == now:
        return len(now)
    pairs = enumerate(zip(before, now, strict=False))
    return next((i for i, (a, b) in pairs if a != b), len(now))
