"""The parts that commands share: kinds of values, options, files to write, and the event loop."""

import contextlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from shell_router.errors import ConfigError

INTERRUPTED = 130
TERMINATED = 143


class Several(tuple[Any, ...]):
    """Values with commas between them on the command line.

    A class of its own, because typer would take a plain tuple for several words.
    """


NONE = Several()


def split_values(text: str, kind: Callable[[str], object] = str) -> tuple[Any, ...]:
    """Split `a,b` into two values of this kind."""
    return tuple(kind(word.strip()) for word in text.split(",") if word.strip())


def option(
    help: str, *names: str, metavar: str | None = None, least: int | None = None, parser: Any = None
) -> Any:
    """Declare an option, by default named as its parameter.

    A flag needs its name, or it would get a `--no-` form too.
    """
    return typer.Option(
        *names,
        help=help,
        metavar=metavar or (None if least is None else "N"),
        min=least,
        parser=parser,
    )


def list_option(kind: Callable[[str], object], help: str, metavar: str = "A,B,…") -> Any:
    """Declare an option of several values with commas between them.

    Its value is a plain tuple, as orjson knows no subclass.
    """
    return option(
        help,
        metavar=metavar,
        parser=lambda value: split_values(value, kind) if isinstance(value, str) else tuple(value),
    )


def argument(metavar: str, help: str) -> Any:
    """Declare a positional argument."""
    return typer.Argument(metavar=metavar, help=help)


Json = Annotated[Path | None, option("Write the figures to this file, as JSON.", metavar="FILE")]
Limit = Annotated[int | None, option("Ask at most this many questions.", least=1)]
Seed = Annotated[int, option("Fixes every random draw.")]
KeyVariable = Annotated[
    str | None,
    option("Environment variable that holds the server's key.", "--api-key-env", metavar="NAME"),
]


def read_key(variable: str | None) -> str | None:
    """Return the key in an environment variable. Raises ConfigError if it is empty."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"--api-key-env: the environment variable {variable} is empty.", remedy="Set it."
        )
    return key


def examples(*lines: str) -> str:
    """Return the end of a command's help."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def require_writable(*files: Path | None) -> None:
    """Raise ConfigError for a file that cannot be written."""
    for file in files:
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ConfigError(
                f"{file} cannot be written.", remedy="Name a file in a folder that is there."
            )


def write(file: Path, content: str | bytes) -> None:
    """Write a file that the user named. Raises ConfigError."""
    try:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}.", remedy="Name a file that you may write."
        ) from error


def say(line: str) -> None:
    """Print a line at once, for commands that take long.

    The line is written in one piece, because a thread writes the log.
    """
    print(f"{line}\n", end="", flush=True)


def give_back_freed_memory() -> None:
    """Let glibc return large buffers to the system when they are freed.

    Otherwise it keeps up to 64 MiB for each thread that has ever held a large body.
    """
    import ctypes

    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError):  # another C library
        for option in (trim_threshold, mmap_threshold):
            ctypes.CDLL(None).mallopt(option, 256 * 1024)


def run(work: Coroutine[Any, Any, object]) -> None:
    """Run `work` to its end.

    Ctrl-C and SIGTERM cancel `work`, so that it ends what it started, and then end the command.
    """
    import asyncio
    import gc
    import signal
    import threading

    import uvloop

    give_back_freed_memory()
    # Requests leave few cycles: looking for them as often as Python does costs a tenth of a
    # request.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    received: list[signal.Signals] = []

    async def ended_by_signals() -> None:
        working = asyncio.ensure_future(work)

        def stop(number: signal.Signals) -> None:
            received.append(number)
            notice = "Stopping…\n".encode()  # by a thread: what reads stderr may have stalled
            threading.Thread(target=os.write, args=(2, notice), daemon=True).start()
            working.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await working

    try:
        uvloop.run(ended_by_signals())
    except asyncio.CancelledError:
        raise typer.Exit(128 + received[0] if received else TERMINATED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
