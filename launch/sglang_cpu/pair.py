"""A prefill-decode pair of real SGLang on this machine, without a GPU.

    python -m launch.sglang_cpu.pair MODEL_FOLDER

with cpu_pair(model, venv, folder) as pair:
    pair.prefill.url, pair.decode.url, pair.bootstrap_port
"""

import argparse
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from launch.sglang_cpu.engine import HOST, EngineServer
from launch.sglang_cpu.environment import (
    BUILD_COMMAND,
    built_environment,
    engine_variables,
    install_plugin,
)
from shell_router.errors import EngineUnreachable
from shell_router.launching.plan import DRAFT_OPTIONS, DRAFT_VARIABLES, TRANSFER_VARIABLES
from shell_router.processes.command import PORT_TAKEN

START_LIMIT_S = 300.0
POLL_S = 0.5
REPORT_S = 10.0
STARTS = 3

COMMON_OPTIONS = (
    *("--host", HOST, "--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule"),
    "--sleep-on-idle",  # by default each scheduler keeps a core busy asking for work
    *("--max-total-tokens", "65536"),  # by default the KV pool takes most of the machine's memory
    *("--incremental-streaming-output", "--enable-metrics"),
    *("--grammar-backend", "llguidance"),
    *("--disaggregation-transfer-backend", "mooncake_tcp"),
)
ROLE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "server": (),
    "prefill": ("--disaggregation-mode", "prefill"),
    "decode": (
        "--disaggregation-mode",
        "decode",
        "--disaggregation-decode-retraction-backup",
        "cpu_tensor",
    ),
}

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CpuPair:
    """A pair's two servers. Their output is in `prefill.log` and `decode.log`."""

    prefill: EngineServer
    decode: EngineServer
    bootstrap_port: int
    bootstrap_host: str = HOST

    def start(self, *, limit_s: float = START_LIMIT_S, progress: Progress = lambda _: None) -> None:
        """Start what does not run and return when both serve; raises EngineUnreachable."""
        start_servers(self.prefill, self.decode, limit_s=limit_s, progress=progress)

    def stop(self) -> None:
        """Stop both servers. Again, it changes nothing."""
        for server in (self.prefill, self.decode):
            server.signal(signal.SIGTERM)  # both at once: each takes seconds to end
        for server in (self.prefill, self.decode):
            server.stop()


def start_servers(
    *servers: EngineServer, limit_s: float = START_LIMIT_S, progress: Progress = lambda _: None
) -> None:
    """Start what does not run and return when all serve; raises EngineUnreachable.

    SGLang chooses some ports a while before it binds them: a server that lost one to another is
    started again.
    """
    end_s = monotonic() + limit_s
    for start in range(1, STARTS + 1):
        for server in servers:
            server.start()
        try:
            until_ready(*servers, limit_s=end_s - monotonic(), progress=progress)
            break
        except EngineUnreachable as error:
            if start == STARTS or PORT_TAKEN not in str(error).lower():
                raise
            progress("a port was taken before it was bound: starting again")


def until_ready(
    *servers: EngineServer, limit_s: float = START_LIMIT_S, progress: Progress = lambda _: None
) -> None:
    """Return when all of these, which are started, serve; raises EngineUnreachable."""
    started_s = reported_s = monotonic()
    waiting = list(servers)
    while True:
        for server in [server for server in waiting if server.healthy()]:
            waiting.remove(server)
            progress(f"{server.role}: ready after {monotonic() - started_s:.0f} s at {server.url}")
        if not waiting:
            return
        if monotonic() - started_s > limit_s:
            raise EngineUnreachable(
                f"The {waiting[0].role} server was not ready within {limit_s:g} s.",
                remedy=f"Read {waiting[0].log}.",
            )
        if monotonic() - reported_s > REPORT_S:
            reported_s = monotonic()
            progress(
                f"{' and '.join(s.role for s in waiting)}: starting for "
                f"{reported_s - started_s:.0f} s"
            )
        time.sleep(POLL_S)


def make_pair(
    model: Path,
    venv: Path,
    folder: Path,
    *,
    options: Sequence[str] = (),
    plugin: bool = True,
    drafts: bool = False,
) -> CpuPair:
    """A pair that is not started yet. `folder` takes its logs; without `plugin` it is SGLang as
    released.

    With `drafts` decode drafts what requests ask for.
    """
    prefill_port, decode_port, bootstrap = free_ports(3)
    options = ("--disaggregation-bootstrap-port", str(bootstrap), *options)
    prefill, decode = (
        make_server(role, port, model, venv, folder, options=options, plugin=plugin, drafts=drafts)
        for role, port in (("prefill", prefill_port), ("decode", decode_port))
    )
    return CpuPair(prefill, decode, bootstrap)


def make_server(
    role: str,
    port: int,
    model: Path,
    venv: Path,
    folder: Path,
    *,
    options: Sequence[str] = (),
    plugin: bool = True,
    drafts: bool = False,
) -> EngineServer:
    """A server that is not started yet, of the role `server` for an undivided one."""
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    if plugin:
        install_plugin(site)
    drafting = drafts and role != "prefill"
    command = (
        *(str(venv / "bin" / "python"), "-m", "sglang.launch_server"),
        *("--port", str(port), "--model-path", str(model)),
        *COMMON_OPTIONS,
        *options,
        *ROLE_OPTIONS[role],
        *(DRAFT_OPTIONS if drafting else ()),
    )
    variables = {
        **engine_variables(site),
        **TRANSFER_VARIABLES,
        **(DRAFT_VARIABLES if drafting else {}),
    }
    return EngineServer(role, command, port, folder / f"{role}.log", variables)


@contextmanager
def cpu_server(
    model: Path,
    venv: Path,
    folder: Path,
    *,
    options: Sequence[str] = (),
    plugin: bool = True,
    drafts: bool = False,
    progress: Progress = lambda _: None,
) -> Iterator[EngineServer]:
    """An undivided server that serves (see `make_pair`), stopped at the end."""
    (port,) = free_ports(1)
    server = make_server(
        "server", port, model, venv, folder, options=options, plugin=plugin, drafts=drafts
    )
    try:
        start_servers(server, progress=progress)
        yield server
    finally:
        server.stop()


@contextmanager
def cpu_pair(
    model: Path,
    venv: Path,
    folder: Path,
    *,
    options: Sequence[str] = (),
    plugin: bool = True,
    drafts: bool = False,
    progress: Progress = lambda _: None,
) -> Iterator[CpuPair]:
    """A pair that serves (see `make_pair`), stopped at the end. Raises EngineUnreachable."""
    pair = make_pair(model, venv, folder, options=options, plugin=plugin, drafts=drafts)
    try:
        pair.start(progress=progress)
        yield pair
    finally:
        pair.stop()


def free_ports(count: int) -> list[int]:
    """Different ports that were free a moment ago."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    try:
        return [found.getsockname()[1] for found in sockets]
    finally:
        for found in sockets:
            found.close()


def serve(model: Path, venv: Path, options: Sequence[str], *, drafts: bool) -> None:
    """Run a pair until SIGINT or SIGTERM, and print its part of the router's configuration."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="sglang-pair-"))
    _say(f"logs: {folder}")
    try:
        with cpu_pair(model, venv, folder, options=options, drafts=drafts, progress=_say) as pair:
            print(
                f'pairs: [{{prefill: "{pair.prefill.url}", decode: "{pair.decode.url}", '
                f"bootstrap_port: {pair.bootstrap_port}}}]",
                flush=True,
            )
            signal.pause()
    except KeyboardInterrupt:
        _say("stopped")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.sglang_cpu.pair", description=__doc__.splitlines()[0]
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--drafts", action="store_true", help="decode drafts what requests ask for")
    parser.add_argument("options", nargs="*", help="given to both servers (put -- before them)")
    arguments = parser.parse_args()
    venv = built_environment()
    if venv is None:
        sys.exit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    serve(arguments.model.resolve(), venv, arguments.options, drafts=arguments.drafts)


if __name__ == "__main__":
    main()
