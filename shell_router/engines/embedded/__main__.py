"""`python -m shell_router.engines.embedded`: one server of a pair, by hand, with SGLang's names for the flags."""

import argparse
import logging
import sys
from collections.abc import Sequence

from shell_router.engines.embedded.settings import DTYPES, MODES, EmbeddedSettings, LoraSettings, ServerSettings
from shell_router.errors import ShellRouterError


def parse_arguments(arguments: Sequence[str]) -> ServerSettings:
    """The settings that the command line gives. Exits with a usage message on unknown flags."""
    parser = argparse.ArgumentParser(prog="python -m shell_router.engines.embedded", description=__doc__)
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
    parser.add_argument("--chunked-prefill-size", type=int, default=512)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument(
        "--kv-wait-s", type=float, default=300.0, help="how long prefill and decode wait for each other"
    )
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loaded-loras", type=int, default=LoraSettings().room, help="with --enable-lora")
    parser.add_argument("--max-lora-rank", type=int, default=LoraSettings().max_rank, help="with --enable-lora")
    given = parser.parse_args(arguments)
    return ServerSettings(
        pair=EmbeddedSettings(
            model_path=given.model_path,
            device=given.device,
            dtype=given.dtype,
            threads=given.threads,
            context_length=given.context_length,
            max_total_tokens=given.max_total_tokens,
            max_running_requests=given.max_running_requests,
            chunked_prefill_size=given.chunked_prefill_size,
            incremental_streaming_output=given.incremental_streaming_output,
            kv_wait_s=given.kv_wait_s,
            host=given.host,
            lora=LoraSettings(given.max_loaded_loras, given.max_lora_rank) if given.enable_lora else None,
        ),
        mode=given.disaggregation_mode,
        port=given.port,
        bootstrap_port=given.disaggregation_bootstrap_port,
    )


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        settings = parse_arguments(sys.argv[1:])
        # Late, so that a mistyped flag is told at once: this import takes seconds.
        from shell_router.engines.embedded.server import run_server  # noqa: PLC0415

        run_server(settings, lambda ports: logging.info("%s listens on %s", settings.mode, ports))
    except ShellRouterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
