"""The `shell-router` command.

A command imports what it needs when it runs, so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shell_router import __version__, errors
from shell_router.cli import batch, experts, lab, serving, train
from shell_router.cli.options import examples

__all__ = ["app", "main"]

WRONG_INPUT = 2


class Commands(TyperGroup):
    """The group of commands.

    It prints the project's own errors in one line, and ends quietly when the reader of the output
    is gone.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except errors.ShellRouterError as error:
            print(f"shell-router: {error}", file=sys.stderr)
            raise typer.Exit(WRONG_INPUT) from error
        except BrokenPipeError:  # `head`, for example, has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return None


app = typer.Typer(
    cls=Commands,
    help="Serve Mixture-of-Agents requests on prefill-decode engine pairs.",
    epilog=examples("shell-router demo", "shell-router serve --config configs/embedded.yaml"),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for part in (serving.app, lab.app):
    app.add_typer(part)
app.add_typer(serving.topology, name="topology")
app.add_typer(batch.app, name="batch")
app.add_typer(experts.app, name="experts")
app.add_typer(train.app, name="train")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"shell-router {__version__}")
        raise typer.Exit


@app.callback()
def top(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    # NumPy's threads spin against each other on busy cores; the gate's matrices are small. Read
    # when NumPy loads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The code is 2 for an error, 130 after Ctrl-C, 143 after SIGTERM.
    """
    try:
        app(arguments, prog_name="shell-router")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
