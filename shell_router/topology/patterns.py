"""Regular expressions whose time is linear in the text, whatever the pattern: RE2, which never goes back.

Python's own `re` takes exponential time for some patterns on some texts, and texts come from clients.
"""

from functools import cache
from typing import Any

import re2


def pattern_error(pattern: str) -> str:
    """Why `pattern` is not a regular expression of RE2's, empty if it is one."""
    try:
        _compiled(pattern)
    except re2.error as error:
        said = error.args[0] if error.args else "cannot be read"
        return said.decode() if isinstance(said, bytes) else str(said)
    return ""


def found_in(pattern: str, text: str) -> bool:
    """Whether `text` holds the pattern somewhere."""
    return _compiled(pattern).search(text) is not None


@cache  # as many as topology files name
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False  # they are told to who wrote the file
    return re2.compile(pattern, options)
