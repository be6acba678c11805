"""How often Python looks for garbage that refers to itself."""

import gc

SERVING = (20_000, 10, 10)
"""Requests leave few cycles: looking at all of them as often as Python does costs a tenth of a request."""
SIMULATING = (100_000, 50, 1000)
"""Thousands of requests at a time live long; what is looked at again and again grows with their number."""


def collect_rarely(thresholds: tuple[int, int, int]) -> None:
    """From now on look as rarely as `thresholds` say (see `gc.set_threshold`), and never at what is loaded by now."""
    gc.freeze()
    gc.set_threshold(*thresholds)
