"""Real SGLang with `--enable-trace`: its spans of a request lie under the span that the router
sends.
"""

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import cpu_pair
from shell_router.core.spans import CURRENT, SpanContext
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair
from tests.fakes.otlp_receiver import receiver
from tests.fakes.scripted_pair import collect, generation, until

pytestmark = pytest.mark.sglang

TRACING = (
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-otlp-proto-http",
)
"""What SGLang's extra `tracing` brings."""


async def test_spans_of_both_servers_are_children_of_the_routers(
    sglang_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = built_environment()
    if venv is None:
        pytest.skip(f"real SGLang is not built for these tests: {BUILD_COMMAND}")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--target",
        str(tmp_path / "site"),
        *TRACING,
    ]
    await asyncio.to_thread(subprocess.run, install, check=True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    span = SpanContext("ab" * 16, "cd" * 8)
    async with receiver() as at:
        with ExitStack() as stack:
            options = ("--enable-trace", "--otlp-traces-endpoint", at.url)
            pair = await asyncio.to_thread(
                stack.enter_context, cpu_pair(sglang_model, venv, tmp_path, options=options)
            )
            address = PairAddress(
                pair.prefill.url, pair.decode.url, pair.bootstrap_host, pair.bootstrap_port
            )
            client = SglangPair(address)
            CURRENT.set(span)
            await collect(client, generation())
            CURRENT.set(None)
            await until(lambda: len(children(at.spans, span)) >= 2)
            await client.aclose()
    assert {name.partition(" ")[0] for name in children(at.spans, span)} == {"prefill", "decode"}


def children(spans: dict, span: SpanContext) -> set[str]:  # type: ignore[type-arg]
    """Names of the spans whose parent it is."""
    of = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
    return {
        name
        for name, found in spans.items()
        for one in found
        if (one.trace_id, one.parent_span_id) == of
    }
