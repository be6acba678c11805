"""The `shell-router` command. What a command needs is imported when it runs, so that `--help` answers at once."""

import argparse
import os
import sys
from collections.abc import Sequence

from shell_router import errors
from shell_router.cli import batching, evaluating, experts, profiling, serving, simulating, topologies, training
from shell_router.cli.running import INTERRUPTED

WRONG_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for an error, 130 after Ctrl-C, 143 after SIGTERM."""
    chosen = parser().parse_args(arguments)
    # NumPy's threads spin against each other on busy cores; the gate's matrices are small. Read when NumPy loads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        return int(chosen.command(chosen))
    except errors.ShellRouterError as error:
        print(f"shell-router: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="shell-router", description="Serve Mixture-of-Agents requests on prefill-decode engine pairs."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    serving.add_commands(commands)
    evaluating.add_commands(commands)
    batching.add_commands(commands)
    simulating.add_commands(commands)
    profiling.add_commands(commands)
    experts.add_commands(commands)
    training.add_commands(commands)
    topologies.add_commands(commands)
    return top
