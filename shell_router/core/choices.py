"""Names of tables' entries in prose."""

from collections.abc import Iterable


def list_names(names: Iterable[str], last: str = "or") -> str:
    """Return code-quoted names as prose: `a`, `b` or `c`."""
    *others, final = (f"`{name}`" for name in names)
    if others:
        return f"{', '.join(others)} {last} {final}"
    return final
