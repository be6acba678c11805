"""All that a deployment may say about scheduling."""

from dataclasses import dataclass, field

from shell_router.scheduling.engine_selection import SelectionSettings
from shell_router.scheduling.queue_order import QueueSettings
from shell_router.scheduling.refusal import require


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """How engines are chosen and requests wait for them.

    Every `poll_s` engines are asked for their state; what they said longer than `stale_s` ago is not believed.
    """

    selection: SelectionSettings = field(default_factory=SelectionSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    poll_s: float = 1.0
    stale_s: float = 5.0

    def __post_init__(self) -> None:
        require(self.poll_s > 0, f"poll_s must be above 0, not {self.poll_s:g}")
        require(
            self.stale_s > self.poll_s,
            f"stale_s ({self.stale_s:g}) must be above poll_s ({self.poll_s:g}): else "
            "nothing that engines say is ever fresh",
        )
