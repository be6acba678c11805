"""The routes that the plugin adds to SGLang's HTTP server."""

import logging
import os
import random
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from shell_router.sglang_plugin.compatibility import Feature
from shell_router.sglang_plugin.drafts import drafts_enabled
from shell_router.sglang_plugin.experts import (
    can_place,
    can_record,
    make_feature,
    read_algorithm,
    record_file,
)
from shell_router.sglang_plugin.patches import FAKE_BOOTSTRAP_HOST, PREFILL_ONLY_PORT

logger = logging.getLogger(__name__)

CONTRACT: Final = 1
"""The version of `/prefill_only` and `/shell_router/capabilities`.

It counts up when an older router would misread them.
"""

EXPERT_RECORD_PATH: Final = "/shell_router/expert_record"


def add_routes(server_args: Any, *_arguments: Any, **_keywords: Any) -> None:
    """Add `GET /shell_router/capabilities` and the routes that this server can offer.

    Runs before `launch_server`.
    """
    from sglang.srt.entrypoints import http_server

    if server_args.tokenizer_worker_num > 1:
        logger.warning(
            "SGLang loads no plugins in its tokenizer workers, so --tokenizer-worker-num %d "
            "leaves out /prefill_only; the router will prefill by real pairs. Use 1 for increments "
            "without KV transfer.",
            server_args.tokenizer_worker_num,
        )
        return
    from fastapi import Request, Response

    capabilities = report_capabilities(server_args, version("sglang"))
    file = record_file()

    async def report() -> dict[str, Any]:
        return capabilities

    async def prefill_only(obj: http_server.GenerateReqInput, request: Request) -> Any:
        """Take a `/generate` body and answer as `/generate`, once its KV is in the radix cache."""
        return await http_server.generate_request(
            make_prefill_only(obj, random.getrandbits(62)), request
        )

    def expert_record() -> Any:  # no coroutine: reading a file would hold up the event loop
        """Return the NumPy archive that the last dump wrote."""
        assert file is not None
        if not file.exists():
            return Response(
                "Nothing was dumped: call /dump_expert_distribution_record first.\n",
                status_code=404,
            )
        return Response(file.read_bytes(), media_type="application/octet-stream")

    http_server.app.add_api_route("/shell_router/capabilities", report, methods=["GET"])
    if capabilities["disaggregation_mode"] != "decode":
        http_server.app.add_api_route("/prefill_only", prefill_only, methods=["POST"])
    if capabilities["expert_record"]:
        http_server.app.add_api_route(EXPERT_RECORD_PATH, expert_record, methods=["GET"])


def report_capabilities(
    server_args: Any, sglang_version: str, variables: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the answer of `GET /shell_router/capabilities`."""
    mode = server_args.disaggregation_mode
    file = record_file(variables)
    algorithm = read_algorithm(variables)
    if file or algorithm:
        fits = not make_feature(file, algorithm).missing()
    else:
        fits = False
    return {
        "contract": CONTRACT,
        "sglang_version": sglang_version,
        "disaggregation_mode": mode,
        "model_path": server_args.model_path,
        "prefill_only": mode != "decode" and not server_args.disable_radix_cache,
        "drafts": drafts_enabled() and server_args.speculative_algorithm == "NGRAM",
        "expert_record": fits and can_record(server_args, file),
        "expert_placement": fits and can_place(server_args, algorithm),
    }


def make_prefill_only(body: Any, room: int) -> Any:
    """Change `body` (a `GenerateReqInput`) to prefills without a decode partner.

    Its own room is kept: SGLang chooses a data-parallel rank by it.
    """
    body.bootstrap_host = FAKE_BOOTSTRAP_HOST
    body.bootstrap_port = PREFILL_ONLY_PORT
    if body.bootstrap_room is None:
        body.bootstrap_room = room
    body.stream = False
    body.sampling_params = _limit_to_one_token(body.sampling_params)
    return body


def _limit_to_one_token(sampling: Any) -> Any:
    if isinstance(sampling, list):
        return [_limit_to_one_token(params) for params in sampling]
    return {**(sampling or {}), "max_new_tokens": 1, "min_new_tokens": 0}


HTTP: Final = "sglang.srt.entrypoints.http_server"
ARGUMENTS: Final = "sglang.srt.server_args.ServerArgs"
FEATURE: Final = Feature(
    hooks=((f"{HTTP}.launch_server", add_routes, "BEFORE"),),
    needs=(
        f"{HTTP}.app.add_api_route",
        f"{HTTP}.generate_request",
        *(
            f"{HTTP}.GenerateReqInput.{name}"
            for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        ),
        *(f"{ARGUMENTS}.{name}" for name in ("disaggregation_mode", "disable_radix_cache")),
        *(f"{ARGUMENTS}.{name}" for name in ("speculative_algorithm", "tokenizer_worker_num")),
    ),
)
"""The hook of the process that serves HTTP; the others need not load its code."""
