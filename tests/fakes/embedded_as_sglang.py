"""A server of the embedded pair with SGLang's command line.

Run `python embedded_as_sglang.py --model-path FOLDER ...`.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from aiohttp import web

from shell_router.standins.embedded.app import EngineApp
from shell_router.standins.embedded.model import load_causal_lm
from shell_router.standins.embedded.prefill import KvCache, PrefillService
from shell_router.standins.embedded.server import run_server
from shell_router.standins.embedded.settings import EmbeddedSettings, ServerSettings


class SwappingApp(EngineApp):
    """An embedded server that also takes the weights of other checkpoints of the same shapes.

    As in SGLang, nothing else changes.
    """

    def application(self) -> web.Application:
        app = super().application()
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        return app

    async def _update_weights(self, request: web.Request) -> web.Response:
        """All of it runs while nothing is in work and no request is taken: it holds up the event
        loop.
        """
        folder = (await request.json())["model_path"]
        while len(self.service.inflight):  # noqa: ASYNC110 # as SGLang, which waits for its requests
            await asyncio.sleep(0.01)
        other = load_causal_lm(replace(self.settings.pair, model_path=folder))
        self.lm.network.load_state_dict(other.network.state_dict())
        if isinstance(self.service, PrefillService):
            self.service._worker.cache = KvCache(self.settings.pair.max_total_tokens)
        return web.json_response({"success": True})


def server_settings(arguments: Sequence[str]) -> ServerSettings:
    """Read the flags; SGLang's flags without a meaning here are accepted and dropped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--disaggregation-mode", required=True, choices=("prefill", "decode"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=0)
    parser.add_argument("--disaggregation-transfer-backend")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--grammar-backend")
    parser.add_argument("--tp-size", type=int)
    for each in fields(EmbeddedSettings):
        flag = f"--{each.name.replace('_', '-')}"
        if isinstance(each.default, bool):
            parser.add_argument(flag, action="store_true")
        elif each.name not in ("model_path", "cores"):
            kind = int if each.default is None else type(each.default)
            parser.add_argument(flag, type=kind, default=each.default)
    given = vars(parser.parse_args(arguments))
    pair = EmbeddedSettings(
        **{each.name: given[each.name] for each in fields(EmbeddedSettings) if each.name in given}
    )
    return ServerSettings(
        pair, given["disaggregation_mode"], given["port"], given["disaggregation_bootstrap_port"]
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run_server(
        server_settings(sys.argv[1:]),
        lambda taken: logging.info("%s listens on %d", taken.mode, taken.port),
        SwappingApp,
    )


if __name__ == "__main__":
    main()
