"""The deployment's `cache` says how long programs are known."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.scripted.server import ScriptedPair, ScriptedSettings
from shell_router.app import run_services
from shell_router.config import CacheSettings, Config, EmbedderSettings, ModelSettings, PairSettings
from shell_router.errors import UnknownProgram
from shell_router.moa.requests import AgentRequest

MODEL = Path(__file__).parents[2] / "models" / "small"


async def texts() -> AsyncIterator[str]:
    yield "Written elsewhere."


@pytest.mark.parametrize(("ttl_s", "known_s"), [(700.0, 600.0), (7200.0, 4000.0)])
async def test_a_program_is_known_for_as_long_as_the_cache_keeps_its_outputs(
    ttl_s: float, known_s: float
) -> None:
    passed_s = 0.0
    async with ScriptedPair(ScriptedSettings(vocabulary=30)) as pair:
        pairs = (PairSettings(pair.prefill.url, pair.decode.url),)
        config = Config(
            {"small": ModelSettings(MODEL, pairs=pairs)},
            embedder=EmbedderSettings("none"),
            cache=CacheSettings(ttl_s=ttl_s),
        )
        async with run_services(config, clock=lambda: time.monotonic() + passed_s) as services:
            programs = services.programs
            await programs.write(AgentRequest("tenant", "p", "a", ""), texts())
            passed_s = known_s
            assert programs.state("tenant", "p").agents == {"a": "finished"}
            assert await programs.read_output("tenant", "p", "a", 0.0) == "Written elsewhere."
            passed_s = ttl_s
            with pytest.raises(UnknownProgram):
                programs.state("tenant", "p")


async def test_a_router_that_starts_without_its_redis_says_so_in_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedPair(ScriptedSettings(vocabulary=30)) as pair:
        config = Config(
            {
                "small": ModelSettings(
                    MODEL, pairs=(PairSettings(pair.prefill.url, pair.decode.url),)
                )
            },
            embedder=EmbedderSettings("none"),
            cache=CacheSettings("redis", "redis://:hidden@127.0.0.1:1/0"),
        )
        async with run_services(config):
            assert "Redis is away" in caplog.text
            assert "hidden" not in caplog.text
