"""Who may call: API keys, or callers on this machine where there are none."""

import functools
import hmac
import ipaddress
from collections.abc import Mapping

from shell_router.errors import RemoteRefused, Unauthorized

LOCAL_TENANT = "local"


def tenant_of(keys: Mapping[str, str], authorization: str, peer: str | None) -> str:
    """The caller's tenant: the name of its key, or LOCAL_TENANT where no keys are set.

    `peer` is the caller's address; None for a Unix socket, which only this machine reaches. Raises Unauthorized.
    """
    if not keys:
        if peer is not None and not _is_loopback(peer):
            raise RemoteRefused(
                f"No API keys are set, so only callers on this machine are served, and {peer} is not.",
                remedy="Add api_keys to the configuration and send one as 'Authorization: Bearer <key>'.",
            )
        return LOCAL_TENANT
    return _key_holder(keys, authorization)


def _key_holder(keys: Mapping[str, str], authorization: str) -> str:
    """Compares with every key, in constant time each, so that timing says nothing of any."""
    scheme, _, secret = authorization.partition(" ")
    given = secret.strip().encode()
    matches = [name for name, key in keys.items() if hmac.compare_digest(key.encode(), given)]
    if scheme.lower() != "bearer" or not matches:
        raise Unauthorized(
            "The API key is missing or wrong.", remedy="Send a valid one as 'Authorization: Bearer <key>'."
        )
    return matches[0]


@functools.lru_cache(maxsize=1024)
def _is_loopback(peer: str) -> bool:
    address = ipaddress.ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
