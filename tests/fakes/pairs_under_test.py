"""The prefill-decode pairs that the wire conformance suite meets: scripted, embedded, and real SGLang."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shell_router.engines.address import PairAddress
from shell_router.engines.embedded.checkpoint import make_checkpoint
from shell_router.engines.embedded.launch import EmbeddedFleet
from shell_router.engines.embedded.settings import EmbeddedSettings, LoraSettings
from shell_router.engines.scripted_server import ScriptedPair, ScriptedSettings

CONTEXT_LENGTH = 2048
SGLANG_VARIABLES = (
    "SHELL_ROUTER_SGLANG_PREFILL_URL",
    "SHELL_ROUTER_SGLANG_DECODE_URL",
    "SHELL_ROUTER_SGLANG_BOOTSTRAP_PORT",
    "SHELL_ROUTER_SGLANG_MODEL",
)


@dataclass(frozen=True)
class PairUnderTest:
    """A running pair. `model` is its folder, None where there is no model behind it and so no text to speak of."""

    address: PairAddress
    model: Path | None
    context_length: int
    vocabulary: int

    def needs_model(self) -> Path:
        """The model's folder; skips the test where there is none."""
        if self.model is None:
            pytest.skip("a scripted pair has no model: it neither reads text nor finds stop strings")
        return self.model


@asynccontextmanager
async def scripted(*, incremental: bool) -> AsyncIterator[PairUnderTest]:
    """A scripted pair that takes 2 ms a token, so that a stream can be aborted."""
    settings = ScriptedSettings(incremental=incremental, token_s=0.002, context_length=CONTEXT_LENGTH)
    async with ScriptedPair(settings) as pair:
        address = PairAddress(pair.prefill.url, pair.decode.url, "127.0.0.1", 8998)
        yield PairUnderTest(address, None, CONTEXT_LENGTH, settings.vocabulary)


@asynccontextmanager
async def embedded(
    folder: Path, *, incremental: bool, lora: LoraSettings | None = None
) -> AsyncIterator[PairUnderTest]:
    """An embedded pair with a tiny model of random weights."""
    model = make_checkpoint(folder, context_length=CONTEXT_LENGTH)
    settings = EmbeddedSettings(str(model), dtype="float64", incremental_streaming_output=incremental, lora=lora)
    async with EmbeddedFleet({"tiny": settings}) as fleet:
        pair = fleet["tiny"]
        address = PairAddress(pair.prefill_url, pair.decode_url, pair.bootstrap_host, pair.bootstrap_port)
        yield of_model(address, model)


@asynccontextmanager
async def running(pair: PairUnderTest) -> AsyncIterator[PairUnderTest]:
    """A pair that somebody else starts and stops."""
    yield pair


def of_model(address: PairAddress, model: Path) -> PairUnderTest:
    """A pair that serves the model of that folder, with the limits in its configuration."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return PairUnderTest(address, model, config["max_position_embeddings"], config["vocab_size"])
