"""Pure choices: when to send a prefill increment, in which order to fill slots."""

from shell_router.scheduling.increments import IncrementSettings, tokens_per_event, tokens_per_increment
from shell_router.scheduling.slot_order import SlotOrder, order_slots
from shell_router.scheduling.update_cost import MeasuredUpdates, UpdateCost

__all__ = [
    "IncrementSettings",
    "MeasuredUpdates",
    "SlotOrder",
    "UpdateCost",
    "order_slots",
    "tokens_per_event",
    "tokens_per_increment",
]
