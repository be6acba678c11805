"""Pure choices: when to send a prefill increment, in which order to fill slots."""

from shell_router.scheduling.increments import IncrementSettings, tokens_per_event, tokens_per_increment
from shell_router.scheduling.slot_order import SlotOrder, order_slots

__all__ = ["IncrementSettings", "SlotOrder", "order_slots", "tokens_per_event", "tokens_per_increment"]
