"""The work of a side process, on its side of the pipe: see `side_process`. The router never loads
it.

python -m shell_router.launching.side_work PACKAGE.MODULE:FUNCTION ARGUMENTS MAX_BATCH
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import BinaryIO

from shell_router.launching.side_process import ANSWER, DO, DONE, FAILED, READY, REQUEST

Work = Callable[[Sequence[bytes]], Sequence[Sequence[bytes]]]
"""Bodies that wait together to their answers, in order, each in pieces."""


class Inbox:
    """Calls that wait, oldest first; those that were given up have no body."""

    def __init__(self) -> None:
        self._waiting: dict[int, bytes | None] = {}
        self._arrived = threading.Condition()

    def put(self, call: int, body: bytes) -> None:
        with self._arrived:
            self._waiting[call] = body
            self._arrived.notify()

    def forget(self, call: int) -> None:
        with self._arrived:
            if call in self._waiting:
                self._waiting[call] = None

    def take(self, limit: int) -> dict[int, bytes | None]:
        """Wait for a call; return it with those that wait too, `limit` at most."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting)
            return {call: self._waiting.pop(call) for call in list(self._waiting)[:limit]}


def serve(load: Callable[[], Work], max_batch: int) -> None:
    """Load, say so, and answer until the input ends; then end the whole process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    inbox = Inbox()
    threading.Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    try:
        work = load()
    except Exception as error:
        # whatever is wrong with a model's files, the router gets the reason instead of a trace on
        # the terminal
        _write_failure(answers, READY, error)
        # a plain exit would wait for the reading thread
        os._exit(1)
    write_done(answers, READY)
    while True:
        taken = inbox.take(max_batch)
        batch = {call: body for call, body in taken.items() if body is not None}
        for call in taken.keys() - batch.keys():
            write_done(
                answers, call
            )  # read by no caller, but the router sees that the process answers
        try:
            done = work(list(batch.values())) if batch else []
        except Exception as error:
            # one body too many for the memory must not end the process
            for call in batch:
                _write_failure(answers, call, error)
        else:
            for call, body in zip(batch, done, strict=True):
                write_done(answers, call, *body)


def write_done(answers: BinaryIO, call: int, *body: bytes) -> None:
    """Answer `call` with a body, given in pieces; READY with none says that requests can be
    answered.
    """
    answers.write(ANSWER.pack(DONE, call, sum(map(len, body))))
    for piece in body:
        answers.write(piece)
    answers.flush()


def _write_failure(answers: BinaryIO, call: int, error: Exception) -> None:
    message = f"{type(error).__name__}: {error}".encode(errors="replace")
    answers.write(ANSWER.pack(FAILED, call, len(message)) + message)
    answers.flush()


def _read(requests: BinaryIO, inbox: Inbox) -> None:
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        kind, call, size = REQUEST.unpack(head)
        body = requests.read(size)
        if kind == DO:
            inbox.put(call, body)
        else:
            inbox.forget(call)
    os._exit(0)


def main() -> None:
    """Serve the work that the named function makes of its arguments, a JSON object."""
    entry, arguments, max_batch = sys.argv[1:]
    module, _, function = entry.partition(":")
    # imported by `serve`: it takes seconds, in which the end of the input must be seen
    serve(lambda: getattr(import_module(module), function)(**json.loads(arguments)), int(max_batch))


if __name__ == "__main__":
    main()
