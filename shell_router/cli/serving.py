"""`shell-router serve` and `launch`."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from shell_router.cli.arguments import Commands
from shell_router.cli.running import run

if TYPE_CHECKING:
    from shell_router.config import Config


def add_commands(commands: Commands) -> None:
    """What these commands take."""
    _add_serve(commands.add_parser("serve", help="serve a deployment over HTTP"))
    _add_launch(commands.add_parser("launch", help="start a deployment's engines, keep them running, and serve it"))


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


def _serve(chosen: argparse.Namespace) -> int:
    from shell_router.wiring import serve

    return run(serve(_deployment(chosen), ready=_say_where))


def _launch(chosen: argparse.Namespace) -> int:
    from shell_router.wiring import launch, plan_launch

    keys_asked = not (chosen.dry_run or chosen.engines_only)
    launched = plan_launch(_deployment(chosen, with_keys=keys_asked), chosen.config.stem, chosen.machine, os.environ)
    if chosen.dry_run:
        router = () if chosen.engines_only else (f"shell-router serve --config {shlex.quote(str(chosen.config))}",)
        print("\n".join((*launched.lines, *router)))
        return 0
    return run(launch(launched, engines_only=chosen.engines_only, ready=_say_where))


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
