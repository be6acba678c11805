"""What `experts profile` writes into a pool's file; all else there stays, comments included."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shell_router.config.expert_pool import ExpertSection, read_expert_pool
from shell_router.config.yaml_entries import entry_line, entry_text, with_entries
from shell_router.errors import ConfigError
from shell_router.expert_pools.measuring import Amount, Measured
from shell_router.expert_pools.splitting import Split

DIGITS = 4


def require_writable(file: Path) -> None:
    """Raise ConfigError where the file is no pool's, or where nothing can be added to it."""
    read_expert_pool(file)
    text = file.read_text(encoding="utf-8")
    for section in ("costs", "experts", "expert_shares"):
        with_entries(text, section, {}, file)


def write_costs(file: Path, device: str, known: Mapping[str, Measured], amount: Amount, date: str) -> None:
    """Put what was measured on a device in the place of what was known of it."""
    costs = {architecture: _rounded(asdict(one.costs)) for architecture, one in known.items()}
    errors = [f"{architecture} {one.error:.1%}" for architecture, one in known.items() if one.error is not None]
    told = (
        f"measured {date}: medians of {amount.rounds} rounds, batches of {', '.join(map(str, amount.batches))}",
        f"mean relative error on batches that K and B were not fitted to: {', '.join(errors) or 'not known'}",
    )
    _rewrite(file, lambda text: with_entries(text, "costs", {device: entry_text(device, costs, told)}, file))


def write_experts(file: Path, experts: Mapping[str, ExpertSection]) -> None:
    """Put experts in the place of those of their names; lines that say the same already stay as they are."""
    known = read_expert_pool(file).experts
    rounded = {name: ExpertSection(**_rounded(asdict(one))) for name, one in experts.items()}
    lines = {
        name: entry_line(name, {**asdict(one), "after": list(one.after)})
        for name, one in rounded.items()
        if known.get(name) != one
    }
    _rewrite(file, lambda text: with_entries(text, "experts", lines, file))


def write_shares(file: Path, split: Split, executors: list[str], told: str) -> None:
    """Put a device's share at each of its executors."""
    share = _rounded_up(split.share)
    entries = {name: entry_text(name, share, [told]) for name in executors}
    _rewrite(file, lambda text: with_entries(text, "expert_shares", entries, file))


def _rewrite(file: Path, change: Callable[[str], str]) -> None:
    text = change(file.read_text(encoding="utf-8"))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.", remedy="Name a file that you may write.") from error


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """To significant digits."""
    return {name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for name, value in values.items()}


def _rounded_up(share: float) -> float:
    """Rounded down, the largest expert might not fit any more."""
    return min(1.0, (int(share * 10_000) + 1) / 10_000)
