"""What several commands share: kinds of values, repeated options, files to write, and the event
loop they run on.
"""

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from shell_router.errors import ConfigError

INTERRUPTED = 130
TERMINATED = 143


class Several(tuple[Any, ...]):
    """Values with commas between them on the command line; typer would take a plain tuple for
    several words.
    """


NONE = Several()


def several(text: str, kind: Callable[[str], object] = str) -> tuple[Any, ...]:
    """`a,b` as two values of this kind."""
    return tuple(kind(word.strip()) for word in text.split(",") if word.strip())


def option(
    help: str, *names: str, metavar: str | None = None, least: int | None = None, parser: Any = None
) -> Any:
    """An option, by default of its parameter's name; a flag needs its name, or it would get a
    `--no-` form too.
    """
    return typer.Option(
        *names,
        help=help,
        metavar=metavar or (None if least is None else "N"),
        min=least,
        parser=parser,
    )


def listed(kind: Callable[[str], object], help: str, metavar: str = "A,B,…") -> Any:
    """An option that takes several values with commas between them, and gives a plain tuple (orjson
    knows no other).
    """
    return option(
        help,
        metavar=metavar,
        parser=lambda one: several(one, kind) if isinstance(one, str) else tuple(one),
    )


def argument(metavar: str, help: str) -> Any:
    """A positional argument."""
    return typer.Argument(metavar=metavar, help=help)


Json = Annotated[Path | None, option("Write the figures to this file, as JSON.", metavar="FILE")]
Seed = Annotated[int, option("Fixes every random draw.")]
KeyVariable = Annotated[
    str | None,
    option("Environment variable that holds the server's key.", "--api-key-env", metavar="NAME"),
]


def secret(variable: str | None) -> str | None:
    """The key in an environment variable. Raises ConfigError where it is empty."""
    if variable is None:
        found = None
    else:
        found = os.environ.get(variable)
    if variable is not None and not found:
        raise ConfigError(
            f"--api-key-env: the environment variable {variable} is empty.", remedy="Set it."
        )
    return found


def takes(**groups: Callable[..., object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of other functions: each function's result is the parameter of its
    name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: signature(make).parameters for name, make in groups.items()}

        def called(**values: Any) -> None:
            made = {
                name: make(**{one: values.pop(one) for one in options[name]})
                for name, make in groups.items()
            }
            command(**values, **made)

        own = [one for name, one in signature(command).parameters.items() if name not in groups]
        every = (*own, *(one for part in options.values() for one in part.values()))
        called.__name__ = command.__name__
        called.__doc__ = command.__doc__
        parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in every]
        called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return called

    return decorate


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def require_writable(*files: Path | None) -> None:
    """Raise ConfigError for a file that cannot be written."""
    for file in files:
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ConfigError(
                f"{file} cannot be written.", remedy="Name a file in a folder that is there."
            )


def write(file: Path, content: str) -> None:
    """Write a file that the user named. Raises ConfigError."""
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}.", remedy="Name a file that you may write."
        ) from error


def say(line: str) -> None:
    """Print a line at once, for commands that take long; in one piece, as a thread writes the
    log."""
    print(f"{line}\n", end="", flush=True)


def print_table(title: str, rows: Sequence[Mapping[str, str]], *, width: int = 160) -> None:
    """Print rows of the same columns; where no terminal says how wide, in `width`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(rows[0] if rows else ()):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    (console if console.is_terminal else Console(width=width)).print(table)


def run(work: Coroutine[Any, Any, object]) -> None:
    """Run `work` to its end. Ctrl-C and SIGTERM cancel it, so that it ends what it started, and end
    the command.
    """
    import asyncio
    import gc
    import signal
    import threading

    import uvloop

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
