"""Whether a new placement is worth a restart of the engine that would load it."""

from dataclasses import dataclass

from shell_router.placement.measures import Measures


@dataclass(frozen=True, slots=True)
class Verdict:
    """`worth_it` or not, and `reason` in words."""

    worth_it: bool
    reason: str


def verdict(now: Measures, new: Measures, margin: float) -> Verdict:
    """Whether `new` beats `now`, both on the same record, by `margin` in all.

    The gain is the share of load that the fullest GPU loses and the share of transitions that no longer cross, added
    up: what one wins the other may lose. ValueError unless `margin` is above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin must be above 0, not {margin}")
    gain = 1 - new.balance / now.balance + now.traffic - new.traffic
    told = f"balance {now.balance:.3f} to {new.balance:.3f}, traffic {now.traffic:.1%} to {new.traffic:.1%}"
    if gain < margin:
        return Verdict(False, f"a gain below {margin:.0%}: {told}")
    return Verdict(True, told)
