"""A server of the embedded pair, by SGLang's command line: `python embedded_as_sglang.py --model-path FOLDER ...`."""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields

from shell_router.standins.embedded.settings import MODES, EmbeddedSettings, ServerSettings
from shell_router.standins.embedded.spawner import run_server


def server_settings(arguments: Sequence[str]) -> ServerSettings:
    """What the flags say; those of SGLang that have no meaning here are taken and dropped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--disaggregation-mode", required=True, choices=MODES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=0)
    parser.add_argument("--disaggregation-transfer-backend")
    parser.add_argument("--enable-metrics", action="store_true")
    for each in fields(EmbeddedSettings):
        flag = f"--{each.name.replace('_', '-')}"
        if isinstance(each.default, bool):
            parser.add_argument(flag, action="store_true")
        elif each.name not in ("model_path", "cores"):
            kind = int if each.default is None else type(each.default)
            parser.add_argument(flag, type=kind, default=each.default)
    given = vars(parser.parse_args(arguments))
    pair = EmbeddedSettings(**{each.name: given[each.name] for each in fields(EmbeddedSettings) if each.name in given})
    return ServerSettings(pair, given["disaggregation_mode"], given["port"], given["disaggregation_bootstrap_port"])


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run_server(server_settings(sys.argv[1:]), lambda taken: logging.info("%s listens on %d", taken.mode, taken.port))


if __name__ == "__main__":
    main()
