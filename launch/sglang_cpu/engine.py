"""One engine server as a child process: started, watched until it is ready, stopped with all its
own children.
"""

import http.client
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shell_router.errors import EngineUnreachable
from shell_router.processes.command import PORT_TAKEN, require_free_ports
from shell_router.processes.with_parent import with_parent

HOST = "127.0.0.1"
STOP_LIMIT_S = 15.0
HEALTH_LIMIT_S = 30.0
LOG_TAIL_CHARACTERS = 2000


class EngineServer:
    """`command`, which serves at `port`, its output in `log`. Not started until `start`.

    It ends with the thread that started it. One process owns it, but any event loop may look at it.
    """

    def __init__(
        self, role: str, command: Sequence[str], port: int, log: Path, variables: Mapping[str, str]
    ) -> None:
        self.role = role
        self.port = port
        self.log = log
        self._command = tuple(command)
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def started(self) -> bool:
        """Whether its process runs, ready or not."""
        return self._process is not None and self._process.poll() is None

    def start(self, *options: str) -> None:
        """Start the process, as the leader of a process group, unless it runs; `options` are for
        this run only.

        Raises EngineUnreachable if its port is taken.
        """
        if self.started:
            return
        self.kill()  # what an earlier run left of its group
        require_free_ports(self.role, HOST, (self.port,))
        with self.log.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                with_parent((*self._command, *options)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._variables,
                cwd=self.log.parent,
                start_new_session=True,
            )

    def healthy(self) -> bool:
        """Whether `/health` answers 200; raises EngineUnreachable when the process has ended.

        One that says that its port is taken is ended: it would neither serve nor end.
        """
        if PORT_TAKEN in self._log_tail().lower():
            self.kill()
        if not self.started:
            raise EngineUnreachable(
                f"The {self.role} server ended before it was ready: …{self._log_tail()}",
                remedy=f"Read {self.log}.",
            )
        connection = http.client.HTTPConnection(HOST, self.port, timeout=HEALTH_LIMIT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _log_tail(self) -> str:
        """The end of what this run wrote."""
        with self.log.open("rb") as log:
            log.seek(self._log_begin)
            return log.read().decode("utf-8", "replace")[-LOG_TAIL_CHARACTERS:]

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the server and all its children; nothing happens when they are gone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left of its process group after a limit. Again, it
        changes nothing.
        """
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and all its children; returns when the server is gone."""
        if self._process is None:
            return
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._process = None
