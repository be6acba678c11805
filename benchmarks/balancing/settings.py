"""The settings that are compared: round robin, the parts of Gimbal that a router has, and ours."""

from collections.abc import Mapping
from dataclasses import dataclass

from shell_router.scheduling.engine_selection import SelectionSettings
from shell_router.scheduling.queue_order import QueueSettings
from shell_router.scheduling.settings import SchedulingSettings

PATIENT_S = 1e6


@dataclass(frozen=True, slots=True)
class Setting:
    """How requests are scheduled, and whether the lengths of outputs are known."""

    scheduling: SchedulingSettings
    known: bool = False


def scheduling(
    policy: str, order: str | None = None, *, room: int = 0, share: float = 1.0, age_s: float = 5.0, bind: str = "place"
) -> SchedulingSettings:
    """With an `order` the queue is the router's, and an engine gets what fits into `share` of its `room`."""
    if order is None:
        return SchedulingSettings(SelectionSettings(policy))
    queue = QueueSettings(order, bind, max_tokens=int(share * room), age_s=age_s, wait_s=PATIENT_S)
    return SchedulingSettings(SelectionSettings(policy), queue)


def settings(room: int) -> Mapping[str, Setting]:
    """By name. Gimbal's engines hold requests back themselves, here the router does for them: `bind` is their arrival.

    EDR, the paper's third part, places experts and is not the router's.
    """
    sjf = "shortest_prefill"
    return {
        "round robin": Setting(scheduling("round_robin")),
        "DPLB": Setting(scheduling("gimbal")),
        "SJFS": Setting(scheduling("round_robin", sjf, room=room, bind="arrival")),
        "DPLB+SJFS": Setting(scheduling("gimbal", sjf, room=room, bind="arrival")),
        "fewest requests": Setting(scheduling("least_running")),
        "ours": Setting(scheduling("scored", sjf, room=room)),
        "ours, lengths known": Setting(scheduling("scored", "shortest_total", room=room, share=1.1), known=True),
    }
