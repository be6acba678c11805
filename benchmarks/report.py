"""How every benchmark here prints: one table, and with `--json` one object on the last line."""

import json
import os
import platform
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def report(
    title: str,
    rows: Sequence[Row],
    *,
    engine: str,
    simulated: bool,
    as_json: bool,
    markdown: bool = False,
) -> None:
    """Print `rows` under `title`; all rows have the same keys, which head the columns. Floats show
    three digits.
    """
    shown = f"{title} (simulated)" if simulated else title
    if markdown:
        lines = [
            rows[0].keys(),
            ["---"] * len(rows[0]),
            *(map(_cell, row.values()) for row in rows),
        ]
        print(f"{shown}\n", *(f"| {' | '.join(line)} |" for line in lines), "", sep="\n")
        return
    table = Table(title=f"{shown}\n{engine}; {machine()}", title_justify="left")
    for key in rows[0]:
        table.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(width=max(120, 17 * len(rows[0]))).print(table)
    if as_json:
        print(
            json.dumps(
                {"title": title, "engine": engine, "simulated": simulated, "rows": list(rows)}
            )
        )


def machine() -> str:
    """What the figures were measured on, in words."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)
