"""The routes that the plugin adds to SGLang's HTTP server."""

import logging
import os
import random
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from shell_router.sglang_plugin.compatibility import Feature
from shell_router.sglang_plugin.drafts import asked
from shell_router.sglang_plugin.experts import (
    asked_algorithm,
    can_place,
    can_record,
    feature,
    record_file,
)
from shell_router.sglang_plugin.patches import FAKE_BOOTSTRAP_HOST, PREFILL_ONLY_PORT

logger = logging.getLogger(__name__)

CONTRACT: Final = 1
"""Counts up when `/prefill_only` or `/shell_router/capabilities` change so that an older router
would misread them.
"""

EXPERT_RECORD_PATH: Final = "/shell_router/expert_record"


def add_routes(server_args: Any, *_arguments: Any, **_named: Any) -> None:
    """Before `launch_server`: `GET /shell_router/capabilities`, and the routes that this server can
    offer.
    """
    from sglang.srt.entrypoints import http_server

    if server_args.tokenizer_worker_num > 1:
        logger.warning(
            "SGLang loads no plugins in its tokenizer workers, so --tokenizer-worker-num %d "
            "leaves out /prefill_only; "
            "the router will prefill by real pairs. Use 1 for increments without KV transfer.",
            server_args.tokenizer_worker_num,
        )
        return
    from fastapi import Request, Response

    found = capabilities(server_args, version("sglang"))
    file = record_file()

    async def report() -> dict[str, Any]:
        return found

    async def prefill_only(obj: http_server.GenerateReqInput, request: Request) -> Any:
        """Takes a `/generate` body and answers as `/generate` does, once its KV is in the radix
        cache.
        """
        return await http_server.generate_request(
            as_prefill_only(obj, random.getrandbits(62)), request
        )

    def expert_record() -> Any:  # no coroutine: reading a file would hold up the event loop
        """What the last dump wrote: an archive of NumPy's."""
        assert file is not None
        if not file.exists():
            return Response(
                "Nothing was dumped: call /dump_expert_distribution_record first.\n",
                status_code=404,
            )
        return Response(file.read_bytes(), media_type="application/octet-stream")

    http_server.app.add_api_route("/shell_router/capabilities", report, methods=["GET"])
    if found["disaggregation_mode"] == "prefill":
        http_server.app.add_api_route("/prefill_only", prefill_only, methods=["POST"])
    if found["expert_record"]:
        http_server.app.add_api_route(EXPERT_RECORD_PATH, expert_record, methods=["GET"])


def capabilities(
    server_args: Any, sglang_version: str, variables: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """What `GET /shell_router/capabilities` answers."""
    mode = server_args.disaggregation_mode
    file = record_file(variables)
    algorithm = asked_algorithm(variables)
    if file or algorithm:
        fits = not feature(file, algorithm).missing()
    else:
        fits = False
    return {
        "contract": CONTRACT,
        "sglang_version": sglang_version,
        "disaggregation_mode": mode,
        "prefill_only": mode == "prefill" and not server_args.disable_radix_cache,
        "drafts": asked() and server_args.speculative_algorithm == "NGRAM",
        "expert_record": fits and can_record(server_args, file),
        "expert_placement": fits and can_place(server_args, algorithm),
    }


def as_prefill_only(body: Any, room: int) -> Any:
    """`body` (a `GenerateReqInput`, changed) as one prefill or a batch of them, without a decode
    partner.

    Its own room is kept: SGLang chooses a data-parallel rank by it.
    """
    body.bootstrap_host = FAKE_BOOTSTRAP_HOST
    body.bootstrap_port = PREFILL_ONLY_PORT
    if body.bootstrap_room is None:
        body.bootstrap_room = room
    body.stream = False
    body.sampling_params = _of_one_token(body.sampling_params)
    return body


def _of_one_token(sampling: Any) -> Any:
    if isinstance(sampling, list):
        return [_of_one_token(one) for one in sampling]
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
