"""A mixture of experts on real SGLang without a GPU: one server, and two ranks whose experts move
while it serves.
"""

import asyncio
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.random_checkpoint import make_moe_checkpoint
from launch.sglang_cpu.engine import EngineServer
from launch.sglang_cpu.environment import (
    BUILD_COMMAND,
    built_environment,
    engine_variables,
    install_plugin,
)
from launch.sglang_cpu.pair import COMMON_OPTIONS, free_ports, until_ready
from shell_router.errors import require
from shell_router.sglang_plugin.experts import PLACEMENT

RANKS = 2
OWN_MODELS = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "cpu_models"}
"""What SGLang's own products of experts lack on a CPU: see launch/sglang_cpu/stand_in/cpu_models.
"""


@contextmanager
def served(folder: Path, model: Path, *options: str, **variables: str) -> Iterator[EngineServer]:
    """One SGLang server without disaggregation, its output in `folder`/log; it is stopped at the
    end.
    """
    venv = built_environment()
    require(
        venv is not None, "The SGLang environment is not built.", f"Build it with: {BUILD_COMMAND}"
    )
    site = folder / "site"
    site.mkdir(parents=True)
    install_plugin(site)
    shared = [
        option
        for option in COMMON_OPTIONS
        if "disaggregation" not in option and option != "mooncake_tcp"
    ]
    (port,) = free_ports(1)
    command = (
        str(venv / "bin" / "python"),
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
    )
    server = EngineServer(
        "single",
        (*command, "--port", str(port), *shared, *options),
        port,
        folder / "log",
        {**engine_variables(site), **variables},
    )
    server.start()
    try:
        until_ready(server)
        yield server
    finally:
        server.stop()


def balanced(passes: int) -> Sequence[str]:
    """Options of two ranks whose experts SGLang balances each time after that many passes."""
    chunk = (
        "--eplb-rebalance-layers-per-chunk",
        "1000",
    )  # without it SGLang times the balancing, by CUDA
    every = ("--eplb-rebalance-num-iterations", str(passes))
    return ("--tp-size", str(RANKS), "--ep-size", str(RANKS), "--enable-eplb", *every, *chunk)


VERDICT = re.compile(
    r"Experts (move|stay) by \w+, .*?balance ([\d.]+) to ([\d.]+), traffic ([\d.]+)% to ([\d.]+)%"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the plugin logs each time: whether experts move, and balance and traffic (%) before and
    by the new one.
    """

    moves: bool
    balance: tuple[float, float]
    traffic: tuple[float, float]


def verdicts(server: EngineServer) -> list[Verdict]:
    """All of the server's so far."""
    found = VERDICT.findall(server.log.read_text(encoding="utf-8", errors="replace"))
    return [
        Verdict(moved == "move", (float(a), float(b)), (float(c), float(d)))
        for moved, a, b, c, d in found
    ]


async def answer(
    session: aiohttp.ClientSession, server: EngineServer, prompt: str | Sequence[int], tokens: int
) -> Any:
    """The ids of the greedy answer of that many tokens."""
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with session.post(
        f"{server.url}/generate", json={**given, "sampling_params": sampling}
    ) as response:
        response.raise_for_status()
        return (await response.json())["output_ids"]


# 2000 tokens of prompt make one pass whose time is that of products; 16 sequences decode together
PROMPT, SEQUENCES, SHORT, OUTPUT, KNOWN_IDS = 2000, 16, 16, 48, (3, 1000)
PASSES = 1500
"""Between two balances: more than those of a phase, so that none falls into one that is timed."""
HIDDEN, INNER = 256, 512
BALANCE_LIMIT_S = 300


async def _round(
    session: aiohttp.ClientSession, server: EngineServer, draws: Random
) -> tuple[float, float]:
    """Milliseconds per token of a prompt, and per step of decoding; no prompt comes twice."""

    def prompt(tokens: int) -> list[int]:
        return [draws.randrange(*KNOWN_IDS) for _ in range(tokens)]

    begun_s = time.perf_counter()
    await answer(session, server, prompt(PROMPT), 1)
    prefill_s = time.perf_counter() - begun_s
    took_s = []
    for tokens in (1, OUTPUT):
        begun_s = time.perf_counter()
        await asyncio.gather(
            *(answer(session, server, prompt(SHORT), tokens) for _ in range(SEQUENCES))
        )
        took_s.append(time.perf_counter() - begun_s)
    return 1e3 * prefill_s / PROMPT, 1e3 * (took_s[1] - took_s[0]) / (OUTPUT - 1)


async def _phases(
    server: EngineServer, rounds: int, moving: bool
) -> tuple[list[list[tuple[float, float]]], bool]:
    """The rounds before and after SGLang's first balance, and whether answers are equal before,
    during and after.
    """
    draws, asked = Random(0), "Tell me about the number and the river."
    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        timeout=limit, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await _round(session, server, draws)
        first = await answer(session, server, asked, OUTPUT)
        equal, phases = True, []
        for phase in range(2):
            phases.append([await _round(session, server, draws) for _ in range(rounds)])
            async with asyncio.timeout(BALANCE_LIMIT_S):
                while moving and len(verdicts(server)) == phase:
                    equal &= await answer(session, server, asked, OUTPUT) == first
        return phases, equal and await answer(session, server, asked, OUTPUT) == first


def rows(folder: Path, rounds: int) -> Iterator[Mapping[str, object]]:
    """By algorithm; the first never moves an expert, which shows how far the machine's speed
    drifts.
    """
    model = make_moe_checkpoint(folder / "model", hidden=HIDDEN, inner=INNER, popular_first=True)
    for algorithm in ("none", "swap", "gimbal"):
        moving = algorithm != "none"
        variables = {**OWN_MODELS, PLACEMENT: algorithm if moving else ""}
        options = ("--disable-radix-cache", *balanced(PASSES if moving else 10**9))
        if not moving:
            options = (*options, "--expert-distribution-recorder-buffer-size", str(PASSES))
        with served(folder / algorithm, model, *options, **variables) as server:
            phases, equal = asyncio.run(_phases(server, rounds, moving))
            found = verdicts(server)
        row: dict[str, object] = {"algorithm": algorithm}
        for phase, name in enumerate(("before", "after")):
            row[f"fullest rank {name}, %"] = (
                100 * found[phase].balance[0] / RANKS if moving else None
            )
            row[f"traffic {name}, %"] = found[phase].traffic[0] if moving else None
        for at, what in enumerate(("prompt token", "decode step")):
            before, after = (sorted(one[at] for one in phase) for phase in phases)
            row[f"{what} before, ms"] = _spread(before)
            row[f"{what} after, ms"] = _spread(after)
            row[f"{what} change"] = (
                f"{statistics.median(after) / statistics.median(before) - 1:+.1%}"
            )
        yield {**row, "answers equal": "yes" if equal else "NO"}


def _spread(values: Sequence[float]) -> str:
    """The median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"
