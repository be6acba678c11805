"""Start a deployment's engines on the machines of a Ray cluster, one Ray job per machine.

    python launch/ray/launch.py configs/sglang-two-machines.yaml --address http://10.0.0.1:8265

Every machine is in the cluster under the address that the deployment's URLs name, and has
shell-router, SGLang, the models and the configuration in the same places. Then, where the router is
to run: shell-router serve --config ….
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shell_router.app import load_config
from shell_router.errors import ShellRouterError
from shell_router.launching.plan import EngineCommand, commands

SUBMIT_LIMIT_S = 120


def machines(engines: Sequence[EngineCommand]) -> dict[str, list[EngineCommand]]:
    """The engines of each host, in the deployment's order."""
    found: dict[str, list[EngineCommand]] = {}
    for engine in engines:
        found.setdefault(engine.host, []).append(engine)
    return found


def submit_command(
    config: Path, address: str, host: str, engines: Sequence[EngineCommand]
) -> list[str]:
    """The `ray job submit` that keeps `engines` running on `host`, which Ray knows by a resource of
    its own.
    """
    gpus = {
        gpu
        for engine in engines
        for gpu in engine.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if gpu
    }
    return [
        *(
            "ray",
            "job",
            "submit",
            "--address",
            address,
            "--submission-id",
            job_name(host),
            "--no-wait",
        ),
        *(
            "--entrypoint-num-gpus",
            str(len(gpus)),
            "--entrypoint-resources",
            json.dumps({f"node:{host}": 0.001}),
        ),
        *(
            "--",
            "shell-router",
            "launch",
            "--config",
            str(config),
            "--machine",
            host,
            "--engines-only",
        ),
    ]


def stop_command(address: str, host: str) -> list[str]:
    """The `ray job stop` for that."""
    return ["ray", "job", "stop", "--address", address, job_name(host)]


def job_name(host: str) -> str:
    return f"shell-router-{host.replace('.', '-').replace(':', '-')}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="launch/ray/launch.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument("config", type=Path, help="the deployment's YAML file")
    parser.add_argument(
        "--address", default="http://127.0.0.1:8265", help="of the Ray cluster's dashboard"
    )
    parser.add_argument("--stop", action="store_true", help="stop the jobs instead")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands, one to a line, and run nothing"
    )
    chosen = parser.parse_args(arguments)
    config = chosen.config.resolve()
    try:
        engines = commands(load_config(config, {}, with_keys=False), python=sys.executable)
    except ShellRouterError as error:
        print(f"launch/ray/launch.py: {error}", file=sys.stderr)
        return 2
    for host, its_engines in machines(engines).items():
        submit = submit_command(config, chosen.address, host, its_engines)
        command = stop_command(chosen.address, host) if chosen.stop else submit
        print(shlex.join(command))
        if not chosen.dry_run:
            subprocess.run(command, check=True, timeout=SUBMIT_LIMIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
