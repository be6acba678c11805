"""The callers that are served: the holders of API keys, or else those on this machine.

Pages of other sites that a browser shows on this machine are not served: such a page may have its
own name resolved to this machine, and may post bodies of the types that need no permission.
"""

import functools
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256

from shell_router.config import ApiKey
from shell_router.errors import (
    ConfigError,
    Forbidden,
    RemoteRefused,
    Unauthorized,
    UnsupportedMediaType,
)

LOCAL = ApiKey(key="", tenant="local", service_tier="priority", operator=True)
"""The key of callers on this machine where no keys are set."""

OPERATORS = frozenset({"/metrics", "/v1/engines"})
ADMINISTRATION = frozenset({"/v1/topologies/{name}"})
"""Routes that change what all tenants are served."""


class Keys:
    """The keys that are valid now; `take` replaces them while requests run."""

    def __init__(
        self,
        keys: Mapping[str, str | ApiKey],
        taken: Callable[[Mapping[bytes, ApiKey]], None] = lambda keys: None,
    ) -> None:
        """Accept `keys`; `taken` is called with all that are valid, whenever they change."""
        self._taken = taken
        self.take(keys)

    def take(self, keys: Mapping[str, str | ApiKey]) -> None:
        """Accept these keys, by their names, and no others from now on.

        Raises ConfigError; the keys before then stay valid.
        """
        by_digest: dict[bytes, ApiKey] = {}
        for name, value in keys.items():
            key = ApiKey(key=value) if isinstance(value, str) else value
            secret = key.key
            if not name or not secret:
                raise ConfigError("keys must have a name and a secret each.", remedy="Write both.")
            key = replace(key, tenant=key.tenant or name)
            other = by_digest.setdefault(_digest(secret), key)
            if other is not key:
                raise ConfigError(
                    f"the keys of {other.tenant!r} and {name!r} are the same.",
                    remedy="Give each its own secret.",
                )
        self.by_digest = by_digest
        self._taken(by_digest)
        self.several = len({key.tenant for key in by_digest.values() if not key.operator}) > 1
        """Whether there are several tenants; operators are none."""

    def find(self, authorization: str, wall: Callable[[], float]) -> ApiKey:
        """Return the key in the header's value; `wall` gives Unix time.

        Raises:
            Unauthorized: The key is missing, wrong or expired.
        """
        scheme, _, secret = authorization.partition(" ")
        # looked up by digest, so that timing says nothing of any key
        key = self.by_digest.get(_digest(secret.strip()))
        if scheme.lower() != "bearer" or key is None:
            raise Unauthorized(
                "The API key is missing or wrong.",
                remedy="Send a valid one as 'Authorization: Bearer <key>'.",
            )
        if key.expires is not None and key.expires_s <= wall():
            raise Unauthorized(
                f"The API key expired at {key.expires}.", remedy="Ask the operator for a new one."
            )
        return key


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "surrogateescape")).digest()  # as headers are read


def require_route(key: ApiKey, method: str, path: str, route: str) -> None:
    """Raise Forbidden unless the key is for `path`, and for `route`, the path's pattern."""
    if key.routes and not any(_covers(allowed, path) for allowed in key.routes):
        raise Forbidden(
            f"The API key is not for {path[:200]}.", remedy=f"It is for: {', '.join(key.routes)}."
        )
    changes = route in ADMINISTRATION and method not in ("GET", "HEAD")
    if not key.operator and (route in OPERATORS or changes):
        raise Forbidden(
            f"{method} {route} is for operators.",
            remedy="Use a key that has `operator: on` in the configuration.",
        )


def _covers(allowed: str, path: str) -> bool:
    return path == allowed or path.startswith(f"{allowed.rstrip('/')}/")


# --- without keys

SAFELISTED_TYPES = frozenset(
    {"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"}
)
"""Fetch's "CORS-safelisted" types. https://fetch.spec.whatwg.org/#cors-safelisted-request-header"""

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]+)?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + _HOST.pattern, re.ASCII)


@functools.lru_cache(maxsize=1024)
def require_local(peer: str, host: str, origin: str | None) -> None:
    """Raise RemoteRefused unless the address and the headers Host and Origin name this machine."""
    _require_own_name("Host", host or "127.0.0.1", _HOST)
    if origin is not None:
        _require_own_name("Origin", origin, _ORIGIN)
    if not _is_loopback(peer):
        raise RemoteRefused(
            f"No API keys are set, so only callers on this machine are served, and {peer} is not.",
            remedy="Add api_keys to the configuration and send one as 'Authorization: "
            "Bearer <key>'.",
        )


def _require_own_name(header: str, value: str, form: re.Pattern[str]) -> None:
    match = form.fullmatch(value)
    if match is None or not _names_this_machine(match[1].strip("[]").lower()):
        raise RemoteRefused(
            f"No API keys are set, so only this machine is served, and the header {header} "
            "names another.",
            remedy="Ask 127.0.0.1 or localhost, or add api_keys to the configuration.",
        )


@functools.lru_cache(maxsize=1024)
def require_unlisted_type(content_type: str) -> None:
    """Raise UnsupportedMediaType for a header of a type that pages of other sites can send."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in SAFELISTED_TYPES:
        raise UnsupportedMediaType(
            f"The body has the Content-Type {media_type}, as pages of other sites can send it.",
            remedy="Send it with -H 'Content-Type: application/json', or add api_keys to the "
            "configuration.",
        )


def _names_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return _is_loopback(name)
    except ValueError:
        return False


def _is_loopback(address: str) -> bool:
    """Whether the IP address is this machine's own. Raises ValueError."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback
