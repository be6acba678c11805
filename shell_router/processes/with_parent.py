"""Run the rest of the command line as this process, which ends with its parent (Linux).

python with_parent.py PARENT_PID PROGRAM ARGUMENT...
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def with_parent(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs `argv` so that it ends with this process; `argv` off Linux."""
    if sys.platform != "linux":
        return tuple(argv)
    return (sys.executable, __file__, str(os.getpid()), *argv)


def main() -> None:
    """Ask the kernel for SIGTERM at the parent's death, then become the program."""
    parent, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before the line above
        sys.exit(1)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
