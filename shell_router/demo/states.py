"""What each agent of a running request is doing, told from the events of its stream."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["waiting", "prefilling", "decoding", "finished", "passed on", "cut off", "failed"]

LOOKS: Mapping[State, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "prefilling": ("▒", "cyan"),
    "decoding": ("█", "bright_green"),
    "finished": ("✓", "green"),
    "passed on": ("»", "green"),
    "cut off": ("✂", "red"),
    "failed": ("✗", "bold red"),
}
"""Per state its character and colour."""


@dataclass(slots=True)
class Progress:
    """One agent so far, in tokens."""

    state: State = "waiting"
    prefilled: int = 0
    decoded: int = 0

    @property
    def tokens(self) -> int | None:
        """The count that says most about the state."""
        counts = {"prefilling": self.prefilled, "decoding": self.decoded, "finished": self.decoded}
        return counts.get(self.state)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one `agent_event` of this agent."""
        match event["type"]:
            case "agent.prefill":
                self.state, self.prefilled = "prefilling", event["prompt_tokens"]
            case "agent.ready":
                self.state, self.prefilled = "prefilling", event["prompt_tokens"]
            case "agent.tokens":
                self.state, self.decoded = "decoding", self.decoded + event["tokens"]
            case "agent.finished":
                self.state, self.decoded = "finished", event["completion_tokens"]
            case "agent.passed_on":
                self.state = "passed on"
            case "agent.stopped":
                self.state = "cut off"
            case "agent.failed":
                self.state = "failed"
