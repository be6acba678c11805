"""One server of a pair as a process, and a small process that forks one for each line it reads.

Importing torch and transformers takes seconds per process; a fork takes milliseconds. The router's
own process cannot be the one that forks: it has threads and sockets. Commands and events are JSON
lines on standard input and output:

    {"start": 7, "name": "small/prefill", "server": its settings, pickled, in base 64}
        ->  {"ready": 7, "pid": ..., "port": ..., "bootstrap_port": ...}  or  {"failed": 7,
        "message": ...}
    {"signal": 15, "server": 7}  ->  that signal to the server, if it still runs
    when a server's process ends:  {"exited": 7, "code": ...}

The end of standard input stops everything, so nothing outlives the router however it dies.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import threading
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp
import torch

# transformers imports them when a model loads: 2 s in each fork
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
import uvloop
from aiohttp import web

from shell_router.errors import ConfigError
from shell_router.standins.embedded.app import EngineApp
from shell_router.standins.embedded.decode import DecodeService
from shell_router.standins.embedded.kv_transfer import BootstrapRooms, KvClient
from shell_router.standins.embedded.model import CausalLm, load_causal_lm
from shell_router.standins.embedded.prefill import PrefillService
from shell_router.standins.embedded.sampling import Grammars
from shell_router.standins.embedded.service import Service
from shell_router.standins.embedded.settings import ServerSettings

SHUTDOWN_LIMIT_S = 3.0
TERM_LIMIT_S = 5.0
PR_SET_NAME = 15


def run_server(
    settings: ServerSettings,
    on_listening: Callable[[ServerSettings], None],
    app: type[EngineApp] = EngineApp,
) -> None:
    """Load the model and serve `app` until SIGTERM or SIGINT. Blocks; call in a process of its own.

    `on_listening` gets the settings with the ports that were really taken.
    """
    _stay_on(settings.pair.cores)
    torch.set_num_threads(settings.pair.threads)
    lm = load_causal_lm(settings.pair)
    uvloop.run(_serve(settings, lm, on_listening, app))


def _stay_on(cores: Collection[int]) -> None:
    """Let this process run on `cores` alone, if there are any. Raises ConfigError."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cores can be chosen on Linux only.", remedy="Leave embedded.cores out.")
    known = os.sched_getaffinity(0)
    if unknown := set(cores) - known:
        raise ConfigError(
            (
                f"there is no core {min(unknown)} for it; there are "
                f"{', '.join(map(str, sorted(known)))}."
            ),
            remedy="Correct embedded.cores.",
        )
    os.sched_setaffinity(0, cores)


async def _serve(
    settings: ServerSettings,
    lm: CausalLm,
    on_listening: Callable[[ServerSettings], None],
    app: type[EngineApp],
) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    pair = settings.pair
    async with AsyncExitStack() as stack:
        bootstrap_port = 0
        service: Service[Any, Any]
        if settings.mode == "prefill":
            rooms = BootstrapRooms(wait_s=pair.kv_wait_s)
            listener = stack.enter_context(
                socket.create_server((pair.host, settings.bootstrap_port))
            )
            bootstrap_port = listener.getsockname()[1]
            await stack.enter_async_context(_site(rooms.application(), listener))
            service = PrefillService(pair, lm, rooms, random.Random())
        else:
            # KV may take long to come and is large: no total limit but the client's own, and no
            # limit on connections
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout
            )
            kv = KvClient(
                await stack.enter_async_context(session), lm.kv_shape, wait_s=pair.kv_wait_s
            )
            service = DecodeService(pair, lm, kv, random.Random())
        stack.push_async_callback(service.stop)
        listener = stack.enter_context(
            socket.create_server((pair.host, settings.port), backlog=512)
        )
        taken = replace(settings, port=listener.getsockname()[1], bootstrap_port=bootstrap_port)
        async with _site(app(taken, lm, service, Grammars(lm)).application(), listener):
            on_listening(taken)
            await stopped.wait()
            service.abort_all()


@asynccontextmanager
async def _site(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    # A client that goes away cancels its request's task: that is how a disconnect aborts.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_LIMIT_S
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


def main() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"
    )
    spawner = Spawner()
    try:
        spawner.run()
    finally:
        spawner.stop_all()


@dataclass(slots=True)
class Spawner:
    """Forks, watches and stops servers. One thread, so that forking is safe."""

    _running: dict[int, int] = field(default_factory=dict)  # server's number by process id
    _lifeline: tuple[int, int] = field(default_factory=os.pipe)
    _pending: bytes = b""

    def run(self) -> None:
        """Obey commands until standard input ends."""
        report(imported=True)
        commands = sys.stdin.fileno()
        woken = _wakeups()
        selector = selectors.DefaultSelector()
        for ready in (commands, woken):
            selector.register(ready, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                chunk = os.read(key.fd, 65536)
                if key.fd == woken:
                    self.reap()
                elif not chunk:
                    return
                else:
                    *lines, self._pending = (self._pending + chunk).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))

    def _obey(self, command: dict[str, Any]) -> None:
        if "start" in command:
            self._start(
                command["start"], command["name"], pickle.loads(b64decode(command["server"]))
            )
            return
        for pid, number in self._running.items():
            if number == command["server"]:
                _signal(pid, command["signal"])

    def _start(self, number: int, name: str, settings: ServerSettings) -> None:
        # held back: Python's after-fork hooks swallow the exit that a SIGTERM asks for, and the
        # server would live on
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
            if pid == 0:
                self._become_server(number, name, settings)
            self._running[pid] = number
        except OSError as error:  # no memory or no process left: the other servers go on
            report(failed=number, message=str(error))
            report(exited=number, code=1)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def stop_all(self) -> None:
        """SIGTERM to every child, SIGKILL after a limit."""
        for pid in self._running:
            _signal(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + TERM_LIMIT_S
        while self._running and time.monotonic() < deadline_s:
            self.reap()
            time.sleep(0.02)
        for pid in self._running:
            _signal(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def reap(self) -> None:
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                report(exited=self._running.pop(pid), code=os.waitstatus_to_exitcode(status))

    def _become_server(self, number: int, name: str, settings: ServerSettings) -> None:
        """In the child: never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for handled in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(handled, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            if sys.platform == "linux":  # what `ps` and `top` call it, 15 bytes at most
                ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
            os.close(self._lifeline[1])
            _end_with(self._lifeline[0])
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            ready = partial(report, ready=number, pid=os.getpid())
            run_server(
                settings, lambda taken: ready(port=taken.port, bootstrap_port=taken.bootstrap_port)
            )
            code = 0
        except Exception as error:
            logging.getLogger(__name__).exception("Server %s failed", name)
            # cut, so that the line is short; it is logged whole
            report(failed=number, message=f"{type(error).__name__}: {error}"[:2000])
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


def report(**event: Any) -> None:
    """One event line, unless the router has gone. Short lines are written whole: children share the
    pipe.
    """
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")


def _end_with(lifeline: int) -> None:
    """End this process when the spawner's end of the pipe closes, which it does however the spawner
    dies.
    """

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(3)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
