"""A small process that imports torch and transformers once and forks a server for each line it reads.

Importing them takes seconds per process; a fork takes milliseconds. The router's own process cannot be the one that
forks: it has threads and sockets. Commands and events are JSON lines on standard input and output:

    {"start": name, "server": {...}}  ->  {"ready": name, "pid": …, "port": …, "bootstrap_port": …}
                                      or  {"failed": name, "message": …}
    {"kill": name}                    ->  SIGKILL to that server, if it still runs
    when a server's process ends:         {"exited": name, "code": …}

The end of standard input stops everything, so nothing outlives the router however it dies.
"""

import contextlib
import ctypes
import json
import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shell_router.engines.embedded.server import Listening, run_server
from shell_router.engines.embedded.settings import EmbeddedSettings, LoraSettings, ServerSettings

TERM_LIMIT_S = 5.0
PR_SET_NAME = 15


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s")
    spawner = Spawner()
    try:
        spawner.run()
    finally:
        spawner.stop_all()


@dataclass(slots=True)
class Spawner:
    """Forks, watches and stops servers. One thread, so that forking is safe."""

    _names: dict[int, str] = field(default_factory=dict)
    _lifeline: tuple[int, int] = field(default_factory=os.pipe)
    _pending: bytes = b""

    def run(self) -> None:
        """Obey commands until standard input ends."""
        report(imported=True)
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read_commands)
        selector.register(_wakeups(), selectors.EVENT_READ, self._reap_woken)
        open_ended = True
        while open_ended:
            for key, _ in selector.select():
                open_ended = key.data(key.fd) and open_ended

    def _read_commands(self, commands: int) -> bool:
        chunk = os.read(commands, 65536)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self.obey(json.loads(line))
        return bool(chunk)

    def _reap_woken(self, woken: int) -> bool:
        os.read(woken, 4096)
        self.reap()
        return True

    def obey(self, command: dict[str, Any]) -> None:
        if "kill" in command:
            self._kill(command["kill"])
        else:
            self._start(command["start"], server_settings(command["server"]))

    def _start(self, name: str, settings: ServerSettings) -> None:
        # held back: Python's after-fork hooks swallow the exit that a SIGTERM asks for, and the server would live on
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
            if pid == 0:
                self._become_server(name, settings)
            self._names[pid] = name
        except OSError as error:  # no memory or no process left: the other servers go on
            report(failed=name, message=str(error))
            report(exited=name, code=1)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _kill(self, name: str) -> None:
        for pid in (pid for pid, running in self._names.items() if running == name):
            _signal(pid, signal.SIGKILL)

    def stop_all(self) -> None:
        """SIGTERM to every child, SIGKILL after a limit."""
        for pid in self._names:
            _signal(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + TERM_LIMIT_S
        while self._names and time.monotonic() < deadline_s:
            self.reap()
            time.sleep(0.02)
        for pid in self._names:
            _signal(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def reap(self) -> None:
        for pid in list(self._names):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                report(exited=self._names.pop(pid), code=os.waitstatus_to_exitcode(status))

    def _become_server(self, name: str, settings: ServerSettings) -> None:
        """In the child: never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            _name_process(name)
            os.close(self._lifeline[1])
            _end_with(self._lifeline[0])
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            run_server(settings, _announcer(name))
            code = 0
        except Exception as error:
            logging.getLogger(__name__).exception("Server %s failed", name)
            report(failed=name, message=f"{type(error).__name__}: {error}")
        finally:
            # Not sys.exit: a fork must not run what its parent registered for its own end.
            os._exit(code)


def _wakeups() -> int:
    """A descriptor that turns readable when a child ends; SIGTERM ends this process in order."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return woken


def server_settings(fields: dict[str, Any]) -> ServerSettings:
    """Read back what `dataclasses.asdict` made of a `ServerSettings`."""
    lora = fields["pair"]["lora"]
    pair = {
        **fields["pair"],
        "cores": tuple(fields["pair"]["cores"]),
        "lora": None if lora is None else LoraSettings(**lora),
    }
    return ServerSettings(**{**fields, "pair": EmbeddedSettings(**pair)})


def report(**event: Any) -> None:
    """One event line, unless the router has gone. Short lines are written whole: children share the pipe."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")


def _announcer(name: str) -> Callable[[Listening], None]:
    def announce(ports: Listening) -> None:
        report(ready=name, pid=os.getpid(), port=ports.port, bootstrap_port=ports.bootstrap_port)

    return announce


def _name_process(name: str) -> None:
    """What `ps` and `top` call this process, 15 bytes at most (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _end_with(lifeline: int) -> None:
    """End this process when the spawner's end of the pipe closes, which it does however the spawner dies."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(3)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
