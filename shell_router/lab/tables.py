"""Tables on a console."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = 170
"""Characters in a line where no terminal says how many."""


def open_console() -> Console:
    """Return a console that is wide enough for the tables and takes no data for markup."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = COLUMNS
    return console


def print_table(
    title: str, rows: Sequence[Mapping[str, str]], console: Console | None = None
) -> None:
    """Print rows with the same columns, the first of them aligned to the left."""
    table = Table(title=Text(title), title_justify="left")
    for number, column in enumerate(rows[0] if rows else ()):
        table.add_column(Text(column), justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    (console or open_console()).print(table)
