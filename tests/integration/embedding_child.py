"""An embedding process whose model obeys its texts; run as a script by the embedder's tests."""

import os
import sys
import threading
from collections.abc import Sequence

import numpy as np

from shell_router.core.predictors import TokenStates
from shell_router.engines.embedding import packed_states
from shell_router.launching.side_process import FORGET, READY, REQUEST
from shell_router.launching.side_work import Work, serve, write_done


class ObedientModel:
    """`die` ends the process, `fail` raises, `hang` never returns; others give one row per
    character.

    The rows hold the number of texts that were embedded together.
    """

    def embed(self, texts: Sequence[str]) -> list[TokenStates]:
        if "die" in texts:
            os._exit(3)
        if "fail" in texts:
            raise MemoryError("too long a text")
        if "hang" in texts:
            threading.Event().wait()
        return [np.full((len(text), 2), len(texts), dtype=np.float32) for text in texts]


def load() -> Work:
    print("a library's greeting must not reach the pipe of answers")
    if "--unloadable" in sys.argv:
        raise OSError("no weights")
    if "--gate" in sys.argv:
        os.read(int(sys.argv[-1]), 1)
    if "--slow" in sys.argv:
        threading.Event().wait()
    model = ObedientModel()
    return lambda bodies: [
        packed_states(states) for states in model.embed([body.decode() for body in bodies])
    ]


def answer_what_was_given_up() -> None:
    """Answer each call when it is given up, and `count` with as many rows as were."""
    given_up = 0
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_done(answers, READY)
    while head := requests.read(REQUEST.size):
        kind, call, size = REQUEST.unpack(head)
        text = requests.read(size)
        given_up += kind == FORGET
        if kind == FORGET or text == b"count":
            write_done(answers, call, *packed_states(np.ones((given_up, 2), dtype=np.float32)))


if __name__ == "__main__":
    if "--contrary" in sys.argv:
        answer_what_was_given_up()
    else:
        serve(load, max_batch=4)
