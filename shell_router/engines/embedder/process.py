"""The embedding process: reads requests from standard input, answers on standard output (`frames`).

It ends when its input does, whatever it is doing, so it never outlives the router.
"""

import argparse
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from shell_router.core.embedding import TokenStates
from shell_router.engines.embedder.default_model import check_weights
from shell_router.engines.embedder.frames import (
    LOADED,
    REQUEST,
    Ask,
    ByteSink,
    write_failure,
    write_loaded,
    write_states,
)


class Texts(Protocol):
    """What the process needs of a model."""

    def embed(self, texts: Sequence[str]) -> list[TokenStates]: ...


class Inbox:
    """Calls that wait, oldest first; those that were given up are dropped."""

    def __init__(self) -> None:
        self._waiting: dict[int, str] = {}
        self._arrived = threading.Condition()

    def put(self, call: int, text: str) -> None:
        with self._arrived:
            self._waiting[call] = text
            self._arrived.notify()

    def forget(self, call: int) -> None:
        with self._arrived:
            self._waiting.pop(call, None)

    def take(self, limit: int) -> dict[int, str]:
        """Wait for a call; return it with those behind it, `limit` at most."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting)
            calls = list(self._waiting)[:limit]
            return {call: self._waiting.pop(call) for call in calls}


def main() -> None:
    """Serve the model named on the command line."""
    settings = _arguments()
    serve(lambda: _load(settings), settings.max_batch)


def serve(load: Callable[[], Texts], max_batch: int) -> None:
    """Load a model, say so, and answer until the input ends; then end the whole process."""
    answers = _claim_stdout()
    inbox = Inbox()
    threading.Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    try:
        model = load()
    except Exception as error:
        # whatever a model's files can do wrong, the router is told instead of a trace on the terminal
        write_failure(answers, LOADED, f"{type(error).__name__}: {error}")
        # a plain exit would wait for the reading thread
        os._exit(1)
    write_loaded(answers)
    while True:
        _answer(model, inbox.take(max_batch), answers)


def _answer(model: Texts, batch: dict[int, str], answers: ByteSink) -> None:
    try:
        states = model.embed(list(batch.values()))
    except Exception as error:
        # one text too many for the memory must not end the process
        for call in batch:
            write_failure(answers, call, f"{type(error).__name__}: {error}")
        return
    for call, rows in zip(batch, states, strict=True):
        write_states(answers, call, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shell_router.engines.embedder.process")
    parser.add_argument("--model", required=True)
    parser.add_argument("--sha256", default="", help="what model.safetensors must hash to")
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    return parser.parse_args()


def _claim_stdout() -> BinaryIO:
    """Keep the pipe for answers; whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _read(requests: BinaryIO, inbox: Inbox) -> None:
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        kind, call, size = REQUEST.unpack(head)
        text = requests.read(size).decode()
        if kind == Ask.EMBED:
            inbox.put(call, text)
        else:
            inbox.forget(call)
    os._exit(0)


def _load(settings: argparse.Namespace) -> Texts:
    if settings.sha256:
        check_weights(Path(settings.model), settings.sha256)
    # imported late: it takes seconds, in which the end of the input must be seen
    from shell_router.engines.embedder.token_states import TokenStateModel  # noqa: PLC0415

    return TokenStateModel(settings.model, device=settings.device, threads=settings.threads)


if __name__ == "__main__":
    main()
