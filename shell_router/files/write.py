"""Write measurements into YAML files."""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from shell_router.errors import ConfigError

DIGITS = 5


def write_measured(file: Path, section: str, entries: Mapping[str, Any], head: str) -> None:
    """Replace `entries` of a section of `file` by name.

    All other values stay, and the comments at the file's head; a new file begins with `head`.

    Raises:
        ConfigError: The file cannot be written.
    """
    before = file.read_text(encoding="utf-8") if file.exists() else head
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
    """Return the value without tuples and None, its numbers rounded to significant digits.

    Digits are significant ones because a step takes milliseconds and a token picoseconds.
    """
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value
