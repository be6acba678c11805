"""`python -m shell_router.standins.embedded`: one server of a pair, by hand, with SGLang's names for the flags."""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields

from shell_router.errors import ShellRouterError
from shell_router.standins.embedded.settings import MODES, EmbeddedSettings, ServerSettings


def parse_arguments(arguments: Sequence[str]) -> ServerSettings:
    """The settings that the command line gives. Exits with a usage message on unknown flags."""
    parser = argparse.ArgumentParser(prog="python -m shell_router.standins.embedded", description=__doc__)
    parser.add_argument("--model-path", "--model", required=True, help="folder of a Qwen3 or Llama model")
    parser.add_argument("--disaggregation-mode", "--mode", required=True, choices=MODES)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998, help="prefill only")
    for each in fields(EmbeddedSettings):
        flag = f"--{each.name.replace('_', '-')}"
        if isinstance(each.default, bool):
            parser.add_argument(flag, action="store_true")
        elif each.name not in ("model_path", "cores"):
            kind = int if each.default is None else type(each.default)
            parser.add_argument(flag, type=kind, default=each.default, help="default: %(default)s")
    given = parser.parse_args(arguments)
    names = given.__dict__.keys() & EmbeddedSettings.__dataclass_fields__.keys()
    pair = EmbeddedSettings(**{name: getattr(given, name) for name in names})
    return ServerSettings(pair, given.disaggregation_mode, given.port, given.disaggregation_bootstrap_port)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        settings = parse_arguments(sys.argv[1:])
        # late, so that a mistyped flag is reported at once: this import takes seconds
        from shell_router.standins.embedded.spawner import run_server  # noqa: PLC0415

        run_server(settings, lambda taken: logging.info("%s listens on port %d", taken.mode, taken.port))
    except ShellRouterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
