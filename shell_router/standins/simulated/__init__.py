"""Engines whose time is computed, not spent: a prefill-decode pair for runs under a virtual clock (B4).

They take real prompts as token ids, remember them in a radix cache as a real engine does, and answer after the seconds
that their costs say. Nothing in here knows whether the event loop's clock is virtual.
"""

from shell_router.standins.simulated.costs import DecodeCosts, PairCosts, PrefillCosts, TransferCosts
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import SimulatedEmbedder, SimulatedTokenizer, Written

__all__ = [
    "DecodeCosts",
    "PairCosts",
    "PrefillCosts",
    "Processor",
    "SimulatedEmbedder",
    "SimulatedPair",
    "SimulatedTokenizer",
    "TransferCosts",
    "Written",
]
