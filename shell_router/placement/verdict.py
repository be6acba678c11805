"""Whether a new placement is worth a restart of the engine that would load it."""

from dataclasses import dataclass

from shell_router.placement.measures import Measures


@dataclass(frozen=True, slots=True)
class Verdict:
    """`worth_it` or not, and `reason` in words."""

    worth_it: bool
    reason: str


def verdict(now: Measures, new: Measures, margin: float) -> Verdict:
    """Whether `new` beats `now`, both on the same record, by `margin` in balance or traffic, and loses in neither.

    `margin` is a share: 0.05 for a fullest GPU with 5 % less load, or 5 of 100 transitions fewer between GPUs.
    ValueError unless it is above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin must be above 0, not {margin}")
    told = f"balance {now.balance:.3f} to {new.balance:.3f}, traffic {now.traffic:.1%} to {new.traffic:.1%}"
    if new.balance > now.balance or new.traffic > now.traffic:
        return Verdict(False, f"not better in both: {told}")
    if 1 - new.balance / now.balance < margin and now.traffic - new.traffic < margin:
        return Verdict(False, f"no gain of {margin:.0%}: {told}")
    return Verdict(True, told)
