import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.sglang_cpu.engine import EngineServer
from launch.sglang_cpu.pair import CpuPair, free_ports
from shell_router.errors import EngineUnreachable

SERVER = """
import http.server, pathlib, sys, time
port, runs, message = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
if message and (len(runs.read_text()) == 1 or message.startswith("always")):
    print(message, file=sys.stderr, flush=True)
    if "goes on" not in message:
        sys.exit(1)
    time.sleep(300)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


class Pair:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = free_ports(3)
        self.pair: CpuPair | None = None

    def of(self, prefill_dies_with: str = "") -> CpuPair:
        prefill, decode, bootstrap = self._ports
        self.pair = CpuPair(
            self._server("prefill", prefill, prefill_dies_with),
            self._server("decode", decode),
            bootstrap,
        )
        return self.pair

    def _server(self, role: str, port: int, dies_with: str = "") -> EngineServer:
        command = (sys.executable, "-c", SERVER, str(port), str(self._runs(role)), dies_with)
        return EngineServer(role, command, port, self._folder / f"{role}.log", os.environ)

    def runs(self, role: str) -> int:
        return len(self._runs(role).read_text())

    def _runs(self, role: str) -> Path:
        return self._folder / role


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Pair]:
    servers = Pair(tmp_path)
    yield servers
    if servers.pair is not None:
        servers.pair.stop()


@pytest.mark.parametrize("after", ["and it ends", "and it goes on"])
def test_a_server_that_lost_its_port_is_started_again_and_the_other_goes_on(
    servers: Pair, after: str
) -> None:
    reported: list[str] = []
    servers.of(f"[Errno 98] Address already in use, {after}").start(progress=reported.append)
    assert (servers.runs("prefill"), servers.runs("decode")) == (2, 1)
    assert any("starting again" in one for one in reported)


def test_a_port_that_stays_taken_is_reported_after_three_starts(servers: Pair) -> None:
    with pytest.raises(EngineUnreachable, match="always address already in use"):
        servers.of("always address already in use").start()
    assert servers.runs("prefill") == 3


def test_a_server_is_not_started_on_a_port_that_another_process_has(servers: Pair) -> None:
    pair = servers.of()
    with (
        socket.create_server(("127.0.0.1", pair.decode.port)),
        pytest.raises(EngineUnreachable, match=f"decode cannot listen .* {pair.decode.port}"),
    ):
        pair.start()
    assert not pair.decode.started


def test_what_an_earlier_run_wrote_is_not_held_against_a_later_one(servers: Pair) -> None:
    pair = servers.of("no such model")
    pair.prefill.log.write_text("[Errno 98] Address already in use", encoding="utf-8")
    with pytest.raises(EngineUnreachable, match="no such model"):
        pair.start()
    assert servers.runs("prefill") == 1


def test_a_server_that_dies_of_anything_else_is_reported_at_once(servers: Pair) -> None:
    with pytest.raises(EngineUnreachable, match="no such model"):
        servers.of("no such model").start()
    assert servers.runs("prefill") == 1
