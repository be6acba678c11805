"""What one decision of the early-exit gate costs: embedding, similarity in both forms, the whole
gate.

    python benchmarks/early_exit_cost.py [--rounds N] [--json]

States of 384 features come from the default embedding model in its process; those of 2560 features
(the width of Qwen3-Embedding-4B) are seeded noise, so nothing is embedded there. Milliseconds,
medians over the rounds.

    embed          text to states, through the embedding process and back
    features_once  one output's states prepared for all its comparisons
    pair           one similarity of two prepared outputs, as the gate computes it
    matrix         the same similarity as the paper writes it: both [h, h] matrices, from the states
    gate           the third completion of a cluster, from its states to its score
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from report import Row, report

from shell_router.core.predictors import TokenStates
from shell_router.early_exit.algorithm1 import features, similarity
from shell_router.early_exit.cluster_gate import ClusterGate
from shell_router.engines.embedding import SentenceTransformerEmbedder

TITLE = "Early exit: milliseconds per step of the gate"
ENGINE = "all-MiniLM-L6-v2, CPU, 1 thread"
TOKENS = (32, 234, 1024, 2000)
WIDTHS = (384, 2560)
WINDOW_TOKENS = 256
WORDS = (
    "time",
    "people",
    "water",
    "number",
    "answer",
    "seven",
    "twelve",
    "table",
    "river",
    "money",
    "light",
    "house",
)


async def main() -> None:
    """Measure every size and print the table; with `--json` the last line is one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    rows: list[Row] = []
    async with SentenceTransformerEmbedder() as embedder:
        for width in WIDTHS:
            embed = embedder.embed if width == WIDTHS[0] else None
            rows += [await _measure(tokens, width, embed, options.rounds) for tokens in TOKENS]
    report(TITLE, rows, engine=ENGINE, simulated=False, as_json=options.json)


async def _measure(
    tokens: int, width: int, embed: Callable[[str], Awaitable[TokenStates]] | None, rounds: int
) -> Row:
    rng = np.random.default_rng([tokens, width])
    embed_ms, states = (
        None,
        [rng.standard_normal((tokens, width), dtype=np.float32) for _ in range(3)],
    )
    if embed is not None:
        embed_ms, states = await _embed(tokens, embed, rng, rounds)
    prepared = [features(one) for one in states]
    return {
        "tokens": tokens,
        "features": width,
        "embed": embed_ms,
        "features_once": _median_ms(rounds, lambda: features(states[0])),
        "pair": _median_ms(rounds, lambda: similarity(prepared[0], prepared[1])),
        "matrix": _median_ms(rounds, lambda: _matrix_form(states[0], states[1])),
        "gate": _gate_ms(states, rounds),
    }


async def _embed(
    tokens: int,
    embed: Callable[[str], Awaitable[TokenStates]],
    rng: np.random.Generator,
    rounds: int,
) -> tuple[float, list[TokenStates]]:
    words = tokens - 2 * -(-tokens // WINDOW_TOKENS)
    times, states = [], []
    for _ in range(max(rounds, 3)):
        text = " ".join(rng.choice(WORDS, words))
        started = time.perf_counter()
        states.append(await embed(text))
        times.append(1e3 * (time.perf_counter() - started))
        assert len(states[-1]) == tokens, "every word must be one token of the model"
    return statistics.median(times), states[:3]


def _matrix_form(first: TokenStates, second: TokenStates) -> float:
    one, other = (_correlation(states.astype(np.float64)) for states in (first, second))
    return float(np.vdot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))


def _correlation(
    states: np.ndarray[Any, np.dtype[np.float64]],
) -> np.ndarray[Any, np.dtype[np.float64]]:
    product = states.T @ states
    scale = np.sqrt(np.diag(product))
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 1e-6 * scale.max())
    return np.asarray(product * inverse * inverse[:, None])


def _gate_ms(states: Sequence[TokenStates], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        gate = ClusterGate(tau=0.7, min_completed=2)
        for one in states[:-1]:
            gate.add_output("a", "", 0.9, features(one))
        started = time.perf_counter()
        gate.add_output("a", "", 0.9, features(states[-1]))
        gate.score()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def _median_ms(rounds: int, step: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


if __name__ == "__main__":
    asyncio.run(main())
