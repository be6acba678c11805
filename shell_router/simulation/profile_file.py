"""A file of profiles that is written model by model: what else stands in it, comments included, stays as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shell_router.config.yaml_entries import entry_text, with_entry
from shell_router.engines.simulated import PairCosts
from shell_router.errors import ConfigError
from shell_router.simulation.profiling import Amount, ProfiledCosts
from shell_router.simulation.settings import load_profiles

HEAD = "# What engines cost, in seconds: docs/simulation.md explains the terms.\nmodels:\n"
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model, on what, and when."""

    profiled: ProfiledCosts
    amount: Amount
    engine: str
    date: str


def require_extensible(file: Path) -> None:
    """Raise ConfigError where `file` is there and profiles cannot be added to it, or where it cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written.", remedy="Name a file in a folder that is there.")
    if file.exists():
        load_profiles(file)
        with_profile(file.read_text(encoding="utf-8"), "profile", "", file)


def write_profile(file: Path, model: str, measured: Measured) -> None:
    """Put a model's profile in `file`, in the place of one it has there. Raises ConfigError."""
    before = file.read_text(encoding="utf-8") if file.exists() else HEAD
    try:
        file.write_text(with_profile(before, model, profile_text(model, measured), file), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.", remedy="Name a file that you may write.") from error


def profile_text(model: str, measured: Measured) -> str:
    """The lines of one model under `models:`, indented by two."""
    return entry_text(model, _plain(measured.profiled.costs), _told(measured))


def with_profile(text: str, model: str, profile: str, file: Path) -> str:
    """See `with_entry`."""
    return with_entry(text, "models", model, profile, file)


def _plain(costs: PairCosts) -> Mapping[str, Mapping[str, Any]]:
    return {
        part: {name: _rounded(one) for name, one in terms.items() if one is not None}
        for part, terms in asdict(costs).items()
    }


def _rounded(value: float) -> float:
    """Significant digits: a step takes milliseconds, a token's share of it may take picoseconds."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _told(measured: Measured) -> Sequence[str]:
    profiled, amount = measured.profiled, measured.amount
    errors = {
        "prefill": profiled.prefill_error,
        "first token": profiled.transfer_error,
        "decode": profiled.decode_error,
    }
    known = ", ".join(f"{what} {error:.1%}" for what, error in errors.items() if error is not None)
    return (
        f"measured {measured.date} on {measured.engine}: medians of {amount.rounds} rounds,",
        f"prompts of {', '.join(map(str, amount.lengths))} tokens, batches of {', '.join(map(str, amount.batches))}",
        f"mean relative error on what the costs were not fitted to: {known or 'not known, too little was timed'}",
    )
