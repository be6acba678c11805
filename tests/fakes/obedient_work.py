"""Work of a worker process that obeys its texts."""

import os
import threading
from collections.abc import Sequence

import numpy as np

from shell_router.processes.worker import Work

Answer = tuple[int, "np.ndarray[tuple[int, int], np.dtype[np.float32]]"]


def load(*, slow: bool = False, unloadable: bool = False, dies: bool = False) -> Work:
    """Return the work, or never return, raise, or end the process."""
    print("a library's greeting must not reach the terminal of the command")
    if dies:
        os._exit(4)
    if unloadable:
        raise OSError("no weights")
    if slow:
        threading.Event().wait()
    return obey


def obey(texts: Sequence[str]) -> list[Answer]:
    """Answer each text with the number of texts in its batch, and a row per character.

    `die` ends the process, `fail` raises, `hang` never returns.
    """
    if "die" in texts:
        os._exit(3)
    if "fail" in texts:
        raise MemoryError("too long a text")
    if "hang" in texts:
        threading.Event().wait()
    return [(len(texts), np.ones((len(text), 2), dtype=np.float32)) for text in texts]
