"""`python -m shell_router.standins.embedded`: one server of a pair, by hand, with SGLang's names for the flags."""

import argparse
import logging
import sys
from collections.abc import Sequence

from shell_router.errors import ShellRouterError
from shell_router.standins.embedded.settings import DTYPES, MODES, EmbeddedSettings, LoraSettings, ServerSettings


def parse_arguments(arguments: Sequence[str]) -> ServerSettings:
    """The settings that the command line gives. Exits with a usage message on unknown flags."""
    parser = argparse.ArgumentParser(prog="python -m shell_router.standins.embedded", description=__doc__)
    parser.add_argument("--model-path", "--model", required=True, help="folder of a Qwen3 or Llama model")
    parser.add_argument("--disaggregation-mode", "--mode", required=True, choices=MODES)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998, help="prefill only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-total-tokens", type=int, default=65536)
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--draft-width", type=int, default=16, help="most tokens of a pass with drafts")
    parser.add_argument("--chunked-prefill-size", type=int, default=512)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument(
        "--kv-wait-s", type=float, default=300.0, help="how long prefill and decode wait for each other"
    )
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument(
        "--max-loaded-loras", type=int, default=LoraSettings().max_loaded_adapters, help="with --enable-lora"
    )
    parser.add_argument("--max-lora-rank", type=int, default=LoraSettings().max_rank, help="with --enable-lora")
    given = parser.parse_args(arguments)
    names = given.__dict__.keys() & EmbeddedSettings.__dataclass_fields__.keys()
    lora = LoraSettings(given.max_loaded_loras, given.max_lora_rank) if given.enable_lora else None
    pair = EmbeddedSettings(**{name: getattr(given, name) for name in names}, lora=lora)
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
