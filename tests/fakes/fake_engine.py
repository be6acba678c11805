"""A server with SGLang's command line and `/health`, run in place of an engine's interpreter.

`GET /health` answers the process ids of the server and its child; `GET /end` ends the server with
code 3 and leaves its child behind.
"""

import argparse
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

LIFE_S = 300
"""Where a test is killed, its engines end by themselves."""

IGNORES_SIGTERM = (
    f"import signal; signal.alarm({LIFE_S}); signal.signal(signal.SIGTERM, "
    "signal.SIG_IGN); signal.pause()"
)


def interpreter(folder: Path, script: Path) -> Path:
    """A program in `folder` that runs `script` with what follows `-m sglang.launch_server`."""
    program = folder / f"as-{script.stem}"
    program.write_text(
        f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{script}" "$@"\n', encoding="utf-8"
    )
    program.chmod(0o755)
    return program


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--no-such-flag", action="store_true")
    parser.add_argument("--finds-port-taken", action="store_true")
    given, _ = parser.parse_known_args()
    signal.alarm(LIFE_S)
    if given.no_such_flag:
        sys.exit("unrecognized arguments: --no-such-flag")
    if given.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if given.finds_port_taken:  # as SGLang, which says so and goes on without the port
        where = f"('127.0.0.1', {given.port})"
        print(f"error while attempting to bind on address {where}: address already in use")
        sys.stdout.flush()
        signal.pause()
    child = subprocess.Popen((sys.executable, "-c", IGNORES_SIGTERM))

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/end":
                os._exit(3)
            self.send_response(503 if given.never_ready else 200)
            self.end_headers()
            self.wfile.write(f"{os.getpid()} {child.pid}".encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    HTTPServer(("127.0.0.1", given.port), Answers).serve_forever()


if __name__ == "__main__":
    main()
