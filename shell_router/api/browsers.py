"""Checks against browsers of this machine that ask for a page from elsewhere.

Such a page may have its own name resolved to this machine, and may post bodies of the types that
need no permission.
"""

import functools
import re

from shell_router.api.keys import is_loopback
from shell_router.errors import RemoteRefused, UnsupportedMediaType

SAFELISTED_TYPES = frozenset(
    {"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"}
)
"""Fetch's "CORS-safelisted" types. https://fetch.spec.whatwg.org/#cors-safelisted-request-header"""

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]+)?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + _HOST.pattern, re.ASCII)


@functools.lru_cache(maxsize=1024)
def require_local(host: str, origin: str | None) -> None:
    """Raise RemoteRefused unless the headers Host and Origin name this machine, where present."""
    _require_own_name("Host", host or "127.0.0.1", _HOST)
    if origin is not None:
        _require_own_name("Origin", origin, _ORIGIN)


def _require_own_name(header: str, value: str, form: re.Pattern[str]) -> None:
    match = form.fullmatch(value)
    if match is None or not _names_this_machine(match[1].strip("[]").lower()):
        raise RemoteRefused(
            f"No API keys are set, so only this machine is served, and the header {header} "
            "names another.",
            remedy="Ask 127.0.0.1 or localhost, or add api_keys to the configuration.",
        )


def require_unlisted_type(content_type: str) -> None:
    """Raise UnsupportedMediaType for a body of a type that pages of other sites can send."""
    if content_type in SAFELISTED_TYPES:
        raise UnsupportedMediaType(
            f"The body has the Content-Type {content_type}, as pages of other sites can send it.",
            remedy="Send it with -H 'Content-Type: application/json', or add api_keys to the "
            "configuration.",
        )


def _names_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return is_loopback(name)
    except ValueError:
        return False
