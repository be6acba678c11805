"""This process as part of a Ray cluster."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from shell_router.errors import ConfigError

CONNECT_LIMIT_S = 5.0


@dataclass(slots=True)
class _Connection:
    """A process is part of one cluster at a time; pools that run at the same time share the connection. Blocks."""

    users: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def join(self, ray: Any, address: str) -> None:
        with self.lock:
            if self.users and self.users[0] != address:
                raise ConfigError(
                    f"A pool runs on the Ray cluster at {self.users[0]} now, so that no other can be joined.",
                    remedy="Give all pools of a router the same ray.address.",
                )
            if not self.users:
                # the router tells what matters itself; Ray would mix the logs of all workers into its bar
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            self.users.append(address)

    def leave(self, ray: Any, address: str) -> None:
        with self.lock:
            self.users.remove(address)
            if not self.users:
                ray.shutdown()


_CONNECTION = _Connection()


@asynccontextmanager
async def joined(address: str) -> AsyncIterator[Any]:
    """The module `ray`, connected to the cluster at `address` while the context is open. Raises ConfigError."""
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a call that comes late starts a cluster of its own
    try:
        import ray  # noqa: PLC0415 - an extra, and heavy
    except ImportError as error:
        raise ConfigError(
            "ray names a cluster, and Ray is not installed.", remedy="pip install 'shell-router[ray]'"
        ) from error
    logging.getLogger("ray").setLevel(logging.ERROR)  # before init sets it: it tells that it is called in a thread
    await _require_listening(address)
    try:
        # a thread of its own also keeps Ray from replacing the handler of SIGTERM
        await asyncio.to_thread(_CONNECTION.join, ray, address)
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_joined(address, error) from error
    try:
        yield ray
    finally:
        await asyncio.to_thread(_CONNECTION.leave, ray, address)


async def _require_listening(address: str) -> None:
    """Without this look Ray waits minutes for a cluster that is not there, and cannot be interrupted."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # auto: found by Ray itself
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:
        raise _not_joined(address, error) from error
    writer.close()
    await writer.wait_closed()


def _not_joined(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"There is no Ray cluster at {address} that could be joined: {str(error) or 'no answer'}.".replace("..", "."),
        remedy="Start one here with `ray start --head`, correct ray.address, or set RAY_AUTH_MODE where it asks so.",
    )
