"""Who calls, and what it may do: API keys, and callers of this machine where there are none."""

import functools
import ipaddress
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from hashlib import sha256
from urllib.parse import urlsplit

from shell_router.api.plain import Request
from shell_router.api.services import ASKED, KEY
from shell_router.config import ApiKey
from shell_router.errors import ConfigError, Forbidden, RemoteRefused, Unauthorized

LOCAL_TENANT = "local"
LOCAL = ApiKey(key="", tenant=LOCAL_TENANT, operator=True)
"""What callers of this machine may do where no keys are set: everything."""


class Keys:
    """The keys that count now; `take` puts others in their place while requests run. Raises ConfigError."""

    def __init__(self, keys: Mapping[str, str | ApiKey]) -> None:
        self.take(keys)

    def take(self, keys: Mapping[str, str | ApiKey]) -> None:
        """From now on these keys, by their names, are known and no others; on a ConfigError those before stay."""
        found: dict[bytes, ApiKey] = {}
        for name, given in keys.items():
            key = ApiKey(key=given) if isinstance(given, str) else given
            if not name or not key.key:
                raise ConfigError("keys must have a name and a secret each.", remedy="Write both.")
            other = found.setdefault(_digest(key.key.encode()), key := replace(key, tenant=key.tenant or name))
            if other is not key:
                raise ConfigError(
                    f"the keys of {other.tenant!r} and {name!r} are the same.", remedy="Give each its own secret."
                )
        self._by_digest = found
        self.several = len({key.tenant for key in found.values() if not key.operator}) > 1
        """Whether there are several tenants; operators are none."""

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    def caller(self, authorization: str, peer: str | None, wall: Callable[[], float]) -> ApiKey:
        """The caller's key, or LOCAL where no keys are set. Raises Unauthorized.

        `peer` is its address; None for a Unix socket, which only this machine reaches. `wall` gives Unix time.
        """
        if not self._by_digest:
            if peer is not None and not _is_loopback(peer):
                raise RemoteRefused(
                    f"No API keys are set, so only callers on this machine are served, and {peer} is not.",
                    remedy="Add api_keys to the configuration and send one as 'Authorization: Bearer <key>'.",
                )
            return LOCAL
        scheme, _, secret = authorization.partition(" ")
        # looked up by digest, so that timing says nothing of any key; surrogates as aiohttp has read them
        key = self._by_digest.get(_digest(secret.strip().encode("utf-8", "surrogateescape")))
        if scheme.lower() != "bearer" or key is None:
            raise Unauthorized(
                "The API key is missing or wrong.", remedy="Send a valid one as 'Authorization: Bearer <key>'."
            )
        if key.expires is not None and key.expires_s <= wall():
            raise Unauthorized(f"The API key expired at {key.expires}.", remedy="Ask the operator for a new one.")
        return key


def _digest(secret: bytes) -> bytes:
    return sha256(secret).digest()


def require_route(key: ApiKey, method: str, path: str, route: str) -> None:
    """Raise Forbidden where the key is not for `path`, or the route, named by its pattern, is the operator's."""
    if key.routes and not any(path == one or path.startswith(f"{one.rstrip('/')}/") for one in key.routes):
        raise Forbidden(f"The API key is not for {path[:200]}.", remedy=f"It is for: {', '.join(key.routes)}.")
    if not key.operator and (route in OPERATORS or (route in ADMINISTRATION and method not in ("GET", "HEAD"))):
        raise Forbidden(
            f"{method} {route} is for operators.", remedy="Use a key that has `operator: on` in the configuration."
        )


OPERATORS = frozenset({"/metrics", "/v1/engines"})
ADMINISTRATION = frozenset({"/v1/topologies/{name}"})
"""Routes that change what all tenants are served."""


def permit(request: Request, models: Collection[str], asked: str = "") -> None:
    """Note what the request asks, by default these; raise Forbidden unless its key may use all of these models."""
    allowed = request[KEY].models
    request[ASKED] = (asked or ",".join(models))[:200]
    if allowed and not set(models) <= set(allowed):
        raise Forbidden("The API key is not for all of the models.", remedy=f"It is for: {', '.join(allowed)}.")


@functools.lru_cache(maxsize=1024)
def require_local(host: str, origin: str | None) -> None:
    """Raise RemoteRefused for what a browser of this machine sends for a page from elsewhere.

    Such a page may have its own name resolved to this machine, and may post what needs no permission.
    """
    named = urlsplit(f"//{host}").hostname if _HOST.fullmatch(host) else ""
    page = urlsplit(origin).hostname or "" if origin is not None and _ORIGIN.fullmatch(origin) else origin
    for what, name in (("Host", named or "127.0.0.1" * (not host)), ("Origin", page)):
        if name is not None and not _names_this_machine(name):
            raise RemoteRefused(
                f"No API keys are set, so only this machine is served, and the header {what} names another.",
                remedy="Ask 127.0.0.1 or localhost, or add api_keys to the configuration.",
            )


_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]+)?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + _HOST.pattern, re.ASCII)


def _names_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return _is_loopback(name)
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)
def _is_loopback(peer: str) -> bool:
    address = ipaddress.ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
