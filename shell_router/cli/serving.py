"""`shell-router serve`, `launch`, `init`, `topology` and `schema`."""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shell_router.cli.options import Several, argument, examples, list_option, option, run, say

if TYPE_CHECKING:
    from shell_router.app.discovery import Found
    from shell_router.config import Config

app = typer.Typer()
topology = typer.Typer(help="Check and draw topology files.", no_args_is_help=True)

Deployment = Annotated[Path, option("The deployment's YAML file.", "--config", metavar="FILE")]
Host = Annotated[str | None, option("Listen on this address instead of the file's.")]
Port = Annotated[
    int | None, option("Listen on this port instead of the file's; 0 takes a free one.")
]
Workers = Annotated[
    int,
    option(
        "Processes that share the port, and Redis; each also listens alone, on the next ports.",
        least=1,
    ),
]
Level = Annotated[
    Literal["debug", "info", "warning", "error"], option("Least level to log.", "--log-level")
]
Topologies = Annotated[list[Path], argument("FILE", "Topology files.")]
Engines = Annotated[
    list[str] | None,
    option(
        "A running SGLang server, which is asked what it serves; can be given several times.",
        "--engine",
        metavar="URL",
    ),
]
Apis = Annotated[
    list[str] | None,
    option(
        "An OpenAI-compatible server, such as http://127.0.0.1:11434/v1, whose models are served; "
        "can be given several times.",
        "--openai",
        metavar="URL",
    ),
]
KeyVariables = Annotated[
    list[str] | None,
    option(
        "The environment variable that holds the key of --openai; of several servers one for each, "
        "in their order, and '' for none.",
        "--openai-key-env",
        metavar="NAME",
    ),
]
ApiModels = Annotated[
    list[str] | None,
    option(
        "A model of --openai to serve instead of all; can be given several times.",
        "--openai-model",
        metavar="NAME",
    ),
]
Aliases = Annotated[
    Several | None, list_option(str, "The deployment's model aliases; others are refused.")
]


@app.command(
    epilog=examples(
        "shell-router serve --config configs/embedded.yaml --port 8000",
        "shell-router serve --engine http://127.0.0.1:30000",
        "shell-router serve --openai http://127.0.0.1:11434/v1",
    )
)
def serve(
    config: Annotated[
        Path | None,
        option(
            "The deployment's YAML file. Default: the tiny models, on this machine.", metavar="FILE"
        ),
    ] = None,
    engine: Engines = None,
    openai: Apis = None,
    openai_key_env: KeyVariables = None,
    openai_model: ApiModels = None,
    host: Host = None,
    port: Port = None,
    workers: Workers = 1,
    log_level: Level = "info",
) -> None:
    """Serve a deployment over HTTP."""
    from shell_router import SHIPPED

    if workers > 1 and config is None:
        from shell_router.errors import ConfigError

        raise ConfigError(
            "--workers needs --config, with a Redis that the workers share.",
            remedy="`shell-router init FOLDER --engine URL` writes a file to add it to.",
        )
    if engine or openai or openai_model or openai_key_env:
        with _discover(config, engine, openai, openai_key_env, openai_model) as file:
            chosen = _deployment(file, host, port, log_level)
            say(f"Models: {', '.join(chosen.models)}")
            _serve(file, chosen, workers, log_level, _print_first_request)
        return
    if config is None:
        config = SHIPPED / "configs" / "embedded.yaml"
        say(f"Without --config this serves the tiny models of {config}")
    chosen = _deployment(config, host, port, log_level)
    _serve(config, chosen, workers, log_level, _print_url)


def _serve(
    file: Path,
    config: "Config",
    workers: int,
    log_level: str,
    ready: "Callable[[Config, str], None]",
) -> None:
    """Serve the configuration of the file, by this process or by several."""
    if workers == 1:
        from shell_router.app import serve

        run(serve(config, ready=partial(ready, config)))
        return
    from shell_router.app.workers import serve_workers

    arguments = ["serve", "--config", str(file), "--log-level", log_level]
    run(serve_workers(config, workers, [*arguments, "--host", config.listen.host]))


@app.command(
    epilog=examples(
        "shell-router launch --config configs/sglang-one-gpu.yaml",
        "shell-router launch --config configs/sglang-two-machines.yaml --machine gpu-2 "
        "--engines-only",
    )
)
def launch(
    config: Deployment,
    host: Host = None,
    port: Port = None,
    log_level: Level = "info",
    dry_run: Annotated[
        bool, option("Print the commands, one to a line, and run nothing.", "--dry-run")
    ] = False,
    machine: Annotated[
        str | None, option("Start only the engines whose URLs name this host.", metavar="HOST")
    ] = None,
    engines_only: Annotated[
        bool, option("Start no router on this machine.", "--engines-only")
    ] = False,
) -> None:
    """Start a deployment's engines and serve it over HTTP.

    Engines that end are started again.
    """
    from shell_router.app.launching import launch, plan_launch

    chosen = _deployment(config, host, port, log_level, with_keys=not (dry_run or engines_only))
    launched = plan_launch(chosen, config.stem, machine, os.environ)
    if dry_run:
        commands = [engine.shell for engine in launched.engines]
        if not engines_only:
            commands.append(f"shell-router serve --config {shlex.quote(str(config))}")
        print("\n".join(commands))
        return
    run(launch(launched, engines_only=engines_only, ready=partial(_print_url, chosen)))


def _deployment(
    file: Path, host: str | None, port: int | None, log_level: str, *, with_keys: bool = True
) -> "Config":
    """Load the configuration that the command line names, and set up logging."""
    import logging

    from shell_router.app import load_config, with_address
    from shell_router.telemetry.recorder import LogLines

    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=log_level.upper(), format=form, handlers=[LogLines()])
    return with_address(load_config(file, os.environ, with_keys=with_keys), host, port)


def _print_url(config: "Config", url: str) -> None:
    say(f"Serving on {url}")
    if config.listen.ui:
        say(f"Watch runs in a browser: {url}/ui")


def _print_first_request(config: "Config", url: str) -> None:
    _print_url(config, url)
    body = {
        "model": "tree-9-3-1",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    }
    say(
        f"Ask: curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )


@contextmanager
def _discover(
    config: Path | None,
    engines: list[str] | None,
    apis: list[str] | None,
    keys: list[str] | None,
    models: list[str] | None,
) -> Iterator[Path]:
    """Give the file of a deployment of the servers, while the context is open."""
    import tempfile

    from shell_router.app.discovery import write_deployment
    from shell_router.errors import ConfigError

    if config is not None:
        raise ConfigError(
            "--config is given together with --engine or --openai.",
            remedy="Give one; `shell-router init FOLDER --engine URL` writes a file to add to.",
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.yaml"
        write_deployment(_ask_servers(engines, apis, keys, models), file)
        yield file


def _ask_servers(
    engines: list[str] | None,
    apis: list[str] | None,
    keys: list[str] | None,
    models: list[str] | None,
) -> "Sequence[Found]":
    import asyncio

    from shell_router.app.discovery import Api, ask_servers
    from shell_router.errors import ConfigError

    urls = apis or []
    if models and not urls:
        raise ConfigError("--openai-model is given without --openai.", remedy="Give its URL.")
    names = keys or [""] * len(urls)
    if len(names) != len(urls):
        raise ConfigError(
            f"--openai-key-env is given {len(names)} times, and --openai {len(urls)} times.",
            remedy="Give one for each --openai, in their order; '' for a server without a key.",
        )
    for name in filter(None, names):
        if not os.environ.get(name):
            raise ConfigError(
                f"--openai-key-env names {name}, which is not set.",
                remedy=f"Set {name} to the key.",
            )
    named = [
        Api(url, name, os.environ.get(name, "")) for url, name in zip(urls, names, strict=True)
    ]
    return asyncio.run(ask_servers(engines or (), named, models or ()))


@app.command(
    epilog=examples(
        "shell-router init mine", "shell-router init mine --engine http://127.0.0.1:30000"
    )
)
def init(
    folder: Annotated[Path, argument("FOLDER", "A new folder.")],
    engine: Engines = None,
    openai: Apis = None,
    openai_key_env: KeyVariables = None,
    openai_model: ApiModels = None,
) -> None:
    """Copy the example deployments, topologies and tiny models into a new folder to edit.

    With --engine or --openai it also writes a deployment of those servers.
    """
    import shutil

    from shell_router import SHIPPED
    from shell_router.errors import ConfigError

    asked = bool(engine or openai or openai_model or openai_key_env)
    file = folder / "configs" / ("engines.yaml" if asked else "embedded.yaml")
    try:
        folder.mkdir(parents=True)
        try:
            for name in ("configs", "topologies", "models"):
                shutil.copytree(
                    SHIPPED / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            if asked:
                from shell_router.app.discovery import write_deployment

                found = _ask_servers(engine, openai, openai_key_env, openai_model)
                write_deployment(found, file, "../topologies")
        except (OSError, ConfigError):
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror or error}.", remedy="Name a folder that is not there yet."
        ) from error
    say(f"Next: cd {shlex.quote(str(folder))} && shell-router serve --config configs/{file.name}")


@topology.command(epilog=examples("shell-router topology check topologies/*.yaml"))
def check(files: Topologies, models: Aliases = None) -> None:
    """Check topology files.

    A mistake is reported with its file, line and remedy.
    """
    from shell_router.topology import Conditional, load_with_others

    for file, checked in load_with_others(files, models=models).items():
        if isinstance(checked, Conditional):
            shape = f"{len(checked.steps)} steps, {len(checked.agents)} agents"
        else:
            layers = "-".join(str(len(layer)) for layer in checked.layers)
            shape = f"{len(checked.agents)} agents in layers of {layers}"
        print(f"{file}: {checked.name} is right: {shape}")


@topology.command(epilog=examples("shell-router topology show topologies/tree-9-3-1.yaml"))
def show(
    file: Annotated[Path, argument("FILE", "A topology file.")],
    models: Aliases = None,
) -> None:
    """Draw a topology."""
    from shell_router.topology import load_with_others
    from shell_router.topology.draw import draw

    print(draw(load_with_others([file], models=models)[file]), end="")


FileKind = Literal["topology", "deployment", "batch-pool", "simulation"]


@app.command(epilog=examples("shell-router schema deployment > deployment.schema.json"))
def schema(kind: Annotated[FileKind, argument("KIND", "The kind of file.")]) -> None:
    """Print the JSON Schema of a kind of YAML file, for editors."""
    from shell_router.app.wings import kind_settings
    from shell_router.batch.pool import Pool
    from shell_router.config import deployment_schema
    from shell_router.files.schema import json_schema
    from shell_router.lab.simulation.settings import Simulation
    from shell_router.topology import topology_schema

    schemas = {
        "topology": topology_schema(),
        "deployment": deployment_schema(kind_settings()),
        "batch-pool": json_schema(Pool, "Shell router batch pool"),
        "simulation": json_schema(Simulation, "Shell router simulation"),
    }
    print(json.dumps(schemas[kind], indent=2))
