"""The activity monitor: the predicted tokens in flight per engine (Chimera, section 3.5)."""

from dataclasses import dataclass

from shell_router.scheduling.engine_state import Asked


@dataclass(slots=True)
class InFlight:
    """What this router has under way on one engine.

    `prefill_tokens` of prompts are not yet prefilled, `output_tokens` are expected and not yet written (together the
    paper's volume I[m]), and `held_tokens` of prompts and outputs are there already, as KV. `updates` of the `requests`
    are prefill-only.
    """

    requests: int = 0
    updates: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    held_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The KV that all of it takes in the end, as far as is expected."""
        return self.prefill_tokens + self.output_tokens + self.held_tokens

    def begin(self, asked: Asked) -> "Entry":
        """A request is sent there."""
        return Entry(self, asked)


class Entry:
    """One request on one engine, from its sending to its end. Whatever ends it, `end` takes all of it away again."""

    __slots__ = ("_held", "_on", "_output", "_prefill", "_prompt", "_update", "ended")

    def __init__(self, on: InFlight, asked: Asked) -> None:
        self._on = on
        self._prefill = asked.new_tokens if asked.prefills else 0
        self._prompt, self._output = asked.prompt_tokens, asked.output_tokens
        self._update, self._held = asked.update, 0
        self.ended = False
        on.requests += 1
        on.updates += asked.update
        on.prefill_tokens += self._prefill
        on.output_tokens += self._output

    def prefilled(self) -> None:
        """Its prompt is prefilled. Calling it again changes nothing."""
        if self.ended or self._held:
            return
        self._on.prefill_tokens -= self._prefill
        self._prefill = 0
        self._hold(self._prompt)

    def wrote(self, tokens: int) -> None:
        """It has written so many more tokens, perhaps more than were expected of it."""
        if self.ended:
            return
        expected = min(tokens, self._output)
        self._output -= expected
        self._on.output_tokens -= expected
        self._hold(tokens)

    def end(self) -> None:
        """It is over: completed, failed, cut off or aborted. Calling it again changes nothing."""
        if self.ended:
            return
        self.ended = True
        self._on.requests -= 1
        self._on.updates -= self._update
        self._on.prefill_tokens -= self._prefill
        self._on.output_tokens -= self._output
        self._on.held_tokens -= self._held

    def _hold(self, tokens: int) -> None:
        self._held += tokens
        self._on.held_tokens += tokens
