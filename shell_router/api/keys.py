"""API keys: who may call, for which routes and models.

Without keys only callers on this machine are served, who may do everything.
"""

import functools
import ipaddress
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from hashlib import sha256

from shell_router.api.services import KEY, MODELS_ASKED
from shell_router.config import ApiKey
from shell_router.errors import ConfigError, Forbidden, RemoteRefused, Unauthorized
from shell_router.http.app import Request

LOCAL = ApiKey(key="", tenant="local", operator=True)
"""The key of callers on this machine where no keys are set."""

OPERATORS = frozenset({"/metrics", "/v1/engines"})
ADMINISTRATION = frozenset({"/v1/topologies/{name}"})
"""Routes that change what all tenants are served."""


class Keys:
    """The keys that are valid now; `take` replaces them while requests run."""

    def __init__(self, keys: Mapping[str, str | ApiKey]) -> None:
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
        self._by_digest = by_digest
        self.several = len({key.tenant for key in by_digest.values() if not key.operator}) > 1
        """Whether there are several tenants; operators are none."""

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    def caller(self, authorization: str, peer: str | None, wall: Callable[[], float]) -> ApiKey:
        """Return the caller's key, or LOCAL where no keys are set.

        Args:
            authorization: The header's value.
            peer: The caller's address; None for a Unix socket, which only this machine reaches.
            wall: Gives Unix time.

        Raises:
            RemoteRefused: No keys are set, and the caller is on another machine.
            Unauthorized: The key is missing, wrong or expired.
        """
        if not self._by_digest:
            if peer is not None and not is_loopback(peer):
                raise RemoteRefused(
                    "No API keys are set, so only callers on this machine are served, and "
                    f"{peer} is not.",
                    remedy="Add api_keys to the configuration and send one as 'Authorization: "
                    "Bearer <key>'.",
                )
            return LOCAL
        scheme, _, secret = authorization.partition(" ")
        # looked up by digest, so that timing says nothing of any key
        key = self._by_digest.get(_digest(secret.strip()))
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


def permit(request: Request, models: Collection[str], asked: str = "") -> None:
    """Raise Forbidden unless the request's key is for all of these models.

    The access log names them, or what is `asked` for.
    """
    allowed = request[KEY].models
    request[MODELS_ASKED] = (asked or ",".join(models))[:200]
    if allowed and not set(models) <= set(allowed):
        raise Forbidden(
            "The API key is not for all of the models.", remedy=f"It is for: {', '.join(allowed)}."
        )


@functools.lru_cache(maxsize=1024)
def is_loopback(address: str) -> bool:
    """Whether the IP address is this machine's own. Raises ValueError."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback
