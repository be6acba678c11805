"""A Python function in a process of its own, a fork of multiprocessing's fork server.

The fork server imports the modules named with `preload` once, so a child that needs them starts
within milliseconds. This process must not fork itself: it has threads and sockets.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGKILL, Signals
from typing import TypeVar

from shell_router.core.exact_json import Values
from shell_router.errors import EngineUnreachable

log = logging.getLogger(__name__)
Result = TypeVar("Result")

_CONTEXT = get_context("forkserver")
_FORK_SERVER_DIED = 255
"""multiprocessing's exit code of a child whose fork server has died; the child may still run."""


def preload(*modules: str) -> None:
    """Name the modules that the fork server imports at its start; too late once it runs."""
    _CONTEXT.set_forkserver_preload(["__main__", *modules])


def start_fork_server() -> None:
    """Start the fork server, unless it runs, and return when it has imported its modules."""
    process = _CONTEXT.Process(target=_do_nothing)
    process.start()
    process.join()


def _do_nothing() -> None:
    """End at once, in a child."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ended a child's function, or one batch of a worker."""

    message: str


class PythonProcess:
    """A call of `entry` in a child process, which ends when this process ends in any way.

    `start` and `wait` block; asyncio code calls them with `run_in_thread`.

    Args:
        name: The process's name in messages and, cut to 15 bytes, in `ps`.
        entry: `package.module:function`. It is imported only in the child, and called there with
            the child's end of `connection` and with `arguments`. If it raises, the child sends a
            `Failure`.
        arguments: Keyword arguments, which are pickled.
        environment: Variables that the child sets before it imports `entry`.
    """

    def __init__(
        self,
        name: str,
        entry: str,
        arguments: Values,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.connection, self._child_end = _CONTEXT.Pipe()
        self.pid: int | None = None
        self.exit_code: int | None = None
        self._is_unwanted = False
        self._process = _CONTEXT.Process(
            target=_run,
            args=(name, entry, arguments, environment or {}, self._child_end),
            name=name,
            daemon=True,
        )

    @property
    def running(self) -> bool:
        """Whether the process has started and not ended."""
        return self.exit_code is None and self._process.is_alive()

    def start(self) -> None:
        """Start the process, once the fork server has imported its modules.

        Raises:
            EngineUnreachable: There is no memory or no process left, or the fork server died.
        """
        try:
            self._process.start()
        except (OSError, EOFError) as error:
            raise EngineUnreachable(
                f"the {self.name} process could not be started: {error!r}."
            ) from error
        finally:
            self._child_end.close()
        self.pid = self._process.pid
        if self._is_unwanted:
            self.signal(SIGKILL)

    def wait(self) -> int:
        """Wait for the end and return the exit code; a signal's is negative. Call it once."""
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        if code == _FORK_SERVER_DIED:
            log.error("The fork server has ended, and %s is ended with it.", self.name)
            self.signal(SIGKILL)
        self.exit_code = code
        self._process.close()
        return code

    def kill(self) -> None:
        """Kill the process; one that is just being started is killed when it runs."""
        self._is_unwanted = True
        self.signal(SIGKILL)

    def signal(self, number: Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.pid is not None and self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def run_in_thread(call: Callable[[], Result]) -> Result:
    """Run a blocking call in a thread that the interpreter does not wait for at its end."""
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="child process", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _run(
    name: str,
    entry: str,
    arguments: Values,
    environment: Mapping[str, str],
    connection: Connection,
) -> None:
    """Call `entry`, in the child."""
    os.setsid()  # a Ctrl-C at the terminal is for the router, which then ends its children in order
    os.dup2(2, 1)  # what a library prints goes to standard error
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):  # off Linux
        Path("/proc/self/comm").write_bytes(name.encode()[:15])
    module, _, function = entry.partition(":")
    try:
        getattr(import_module(module), function)(connection, **arguments)
    except Exception as error:
        connection.send(Failure(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    """End this process when its parent has ended."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(3)
