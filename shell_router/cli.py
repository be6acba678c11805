"""The `shell-router` command. What a command needs is imported when it runs, so that `--help` answers at once."""

# ruff: noqa: PLC0415 - see the docstring

import argparse
import json
import os
import shlex
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shell_router import errors

if TYPE_CHECKING:
    import signal

    from shell_router.config import Config

WRONG_INPUT = 2
INTERRUPTED = 130
TERMINATED = 143


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
    _add_serve(commands.add_parser("serve", help="serve a deployment over HTTP"))
    _add_launch(commands.add_parser("launch", help="start a deployment's engines, keep them running, and serve it"))
    _add_demo(commands.add_parser("demo", help="start everything on this machine and ask a few questions"))
    topology = commands.add_parser("topology", help="check and draw topology files")
    _add_topology(topology.add_subparsers(required=True, metavar="COMMAND"))
    return top


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--config", type=Path, required=True, help="the deployment's YAML file")
    serve.add_argument("--host", help="listen here instead of where the file says")
    serve.add_argument("--port", type=int, help="listen on this port instead; 0 takes a free one")
    serve.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    serve.set_defaults(command=_serve)


def _add_launch(launch: argparse.ArgumentParser) -> None:
    _add_serve(launch)
    launch.add_argument("--dry-run", action="store_true", help="print the commands, one to a line, and run nothing")
    launch.add_argument("--machine", metavar="HOST", help="start only the engines whose URLs name this host")
    launch.add_argument("--engines-only", action="store_true", help="no router on this machine")
    launch.set_defaults(command=_launch)


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--rounds", type=_positive, default=2, help="questions per topology (default 2)")
    demo.add_argument("--new-tokens", type=_positive, default=64, help="tokens that each agent writes (default 64)")
    demo.add_argument("--seed", type=int, default=0, help="fixes the draws of the early-exit gate (default 0)")
    demo.add_argument("--json", action="store_true", help="no drawing; one JSON object on the last line")
    demo.set_defaults(command=_demo)


def _add_topology(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser("check", help="say whether topology files are right, or what is wrong where")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE")
    check.add_argument("--models", type=_names, help="the deployment's model aliases: a,b,c")
    check.set_defaults(command=_topology_check)
    show = commands.add_parser("show", help="draw a topology")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--models", type=_names, help="the deployment's model aliases: a,b,c")
    show.add_argument("--mermaid", action="store_true", help="print a Mermaid flowchart")
    show.set_defaults(command=_topology_show)
    schema = commands.add_parser("schema", help="print the JSON Schema of topology files, for editors")
    schema.set_defaults(command=_topology_schema)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _serve(chosen: argparse.Namespace) -> int:
    from shell_router.wiring import serve

    return _run(serve(_deployment(chosen), ready=_say_where))


def _launch(chosen: argparse.Namespace) -> int:
    from shell_router.wiring import launch, plan_launch

    keys_asked = not (chosen.dry_run or chosen.engines_only)
    launched = plan_launch(_deployment(chosen, with_keys=keys_asked), chosen.config.stem, chosen.machine, os.environ)
    if chosen.dry_run:
        router = () if chosen.engines_only else (f"shell-router serve --config {shlex.quote(str(chosen.config))}",)
        print("\n".join((*launched.lines, *router)))
        return 0
    return _run(launch(launched, engines_only=chosen.engines_only, ready=_say_where))


def _deployment(chosen: argparse.Namespace, *, with_keys: bool = True) -> "Config":
    """The configuration that the command line names, and logging as it asks."""
    import logging

    from shell_router.config import load_config
    from shell_router.wiring import with_address

    logging.basicConfig(level=chosen.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = load_config(chosen.config, os.environ, with_keys=with_keys)
    return with_address(config, chosen.host, chosen.port)


def _say_where(url: str) -> None:
    print(f"Serving on {url}", flush=True)


def _demo(chosen: argparse.Namespace) -> int:
    from shell_router.demo import DemoSettings, run_demo

    settings = DemoSettings(chosen.rounds, chosen.new_tokens, chosen.seed, as_json=chosen.json)
    return _run(run_demo(settings))


def _topology_check(chosen: argparse.Namespace) -> int:
    from shell_router.topology import load_topology

    for file in chosen.files:
        topology = load_topology(file, models=chosen.models)
        layers = "-".join(str(len(layer)) for layer in topology.layers)
        print(f"{file}: {topology.name} is right: {len(topology.agents)} agents in layers of {layers}")
    return 0


def _topology_show(chosen: argparse.Namespace) -> int:
    from shell_router.topology import draw_mermaid, draw_terminal, load_topology

    draw = draw_mermaid if chosen.mermaid else draw_terminal
    print(draw(load_topology(chosen.file, models=chosen.models)), end="")
    return 0


def _topology_schema(_chosen: argparse.Namespace) -> int:
    from shell_router.topology import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _run(work: Coroutine[Any, Any, None]) -> int:
    """Run `work` to its end; Ctrl-C and SIGTERM cancel it, so that it ends what it started."""
    import asyncio
    import signal

    import uvloop

    _collect_rarely()
    received: list[signal.Signals] = []
    try:
        uvloop.run(_ended_by_signals(work, received))
    except asyncio.CancelledError:
        return 128 + received[0] if received else TERMINATED
    return 0


def _collect_rarely() -> None:
    """What is loaded stays, and requests leave few cycles: looking at all of it so often costs a tenth of a request."""
    import gc

    gc.freeze()
    gc.set_threshold(20_000)


async def _ended_by_signals(work: Coroutine[Any, Any, None], received: "list[signal.Signals]") -> None:
    import asyncio
    import signal

    task = asyncio.current_task()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        received.append(number)
        print("Stopping…", file=sys.stderr, flush=True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    await work
