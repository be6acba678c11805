"""Where a request was sent, and why."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placed:
    """An engine that took a request: its name, by which policy and for which reason, and how long the request waited.

    `engine` is its role, or `engine` where it has all roles, and its number among those of its model: `prefill-0`.
    `adapter_s` is how long it waited there for its adapter.
    """

    engine: str
    policy: str
    why: str
    waited_s: float = 0.0
    adapter_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.engine} ({self.policy}: {self.why})"
