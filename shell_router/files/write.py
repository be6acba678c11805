"""YAML files that commands write what they measured into."""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from shell_router.errors import ConfigError

DIGITS = 5


def write_measured(file: Path, section: str, entries: Mapping[str, Any], head: str = "") -> None:
    """Put `entries` into a section of `file`, in the place of those of their names. Raises
    ConfigError.

    All other values stay, and of its comments those at its head; a new file begins with `head`.
    """
    if file.exists():
        before = file.read_text(encoding="utf-8")
    else:
        before = head
    content = yaml.safe_load(before) or {}
    content[section] = {**(content.get(section) or {}), **plain(entries)}
    kept = "".join(takewhile(lambda line: line.startswith("#"), before.splitlines(keepends=True)))
    try:
        file.write_text(
            kept + yaml.safe_dump(content, sort_keys=False, width=120), encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}.", remedy="Name a file that you may write."
        ) from error


def plain(value: Any) -> Any:
    """Without tuples and None, and to significant digits: a step takes milliseconds, a token's
    share picoseconds.
    """
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value
