"""Runs the settings in turns, and makes a row of each."""

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from report import Row

from shell_router.api import Services
from shell_router.core.model import Tokenizer
from shell_router.execution import MoaRequest
from shell_router.simulation.figures import Figures, figures_of
from shell_router.telemetry import Trace
from shell_router.topology import Topology

WORDS = ("time", "people", "water", "number", "answer", "seven", "twelve", "table", "river", "money", "light", "house")


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured: rounds after one that warms up, and lengths in tokens."""

    rounds: int
    new_tokens: int
    question_tokens: int


async def measured_rows(services: Services, settings: Mapping[str, Topology], amount: Amount) -> list[Row]:
    """One row per setting; the settings take turns, each with a question nobody has asked before."""
    found: dict[str, list[Figures]] = {name: [] for name in settings}
    words = random.Random()  # by the system: pairs that run already may have seen the questions of an earlier run
    (tokenizer, *_) = (model.tokenizer for model in services.models.values())
    for round_number in range(amount.rounds + 1):
        for name, topology in settings.items():
            question = drawn_question(words, amount.question_tokens, tokenizer)
            figures = figures_of(topology, await run(services, topology, f"{name}-{round_number}", question))
            if round_number:  # the first warms up
                found[name].append(figures)
    return [row(name, found) for name in settings]


def drawn_question(words: random.Random, tokens: int, tokenizer: Tokenizer) -> str:
    """Words that are about `tokens` tokens."""
    drawn = words.choices(WORDS, k=tokens)
    tokens_per_word = len(tokenizer.encode(" ".join(drawn))) / len(drawn)
    return " ".join(drawn[: max(1, round(tokens / tokens_per_word))])


async def run(services: Services, topology: Topology, run_id: str, question: str) -> Mapping[str, Any]:
    """The trace of one request."""
    trace = Trace(
        run_id,
        tenant="benchmark",
        target=topology.name,
        root=topology.root.id,
        started_s=services.clock(),
        wall_s=services.wall(),
        precursors={name: agent.precursors for name, agent in topology.agents.items()},
    )
    seed = sum(run_id.encode())  # unlike a hash the same in every process
    request = MoaRequest(run_id, "benchmark", ({"role": "user", "content": question},), seed=seed)
    await services.executor.run(topology, request, trace.add)
    trace.ended(services.clock(), "finished")
    return trace.as_json()


def row(name: str, found: Mapping[str, Sequence[Figures]]) -> Row:
    """One setting's medians."""
    mine, dense, tree = found[name], found["all-to-all"], found["tree"]
    return {
        "setting": name,
        "end_to_end_ms": 1e3 * median(one.end_to_end_s for one in mine),
        "vs_all_to_all": median(a.end_to_end_s / b.end_to_end_s for a, b in zip(mine, dense, strict=True)),
        "vs_tree": median(a.end_to_end_s / b.end_to_end_s for a, b in zip(mine, tree, strict=True)),
        "second_layer_ms": 1e3 * median(one.second_layer_s for one in mine),
        "second_vs_tree": median(a.second_layer_s / b.second_layer_s for a, b in zip(mine, tree, strict=True)),
        "exposed_ms": 1e3 * median(one.exposed_s for one in mine),
        "exposed_share": median(a.reader_exposed_s / b.reader_exposed_s for a, b in zip(mine, tree, strict=True)),
        "late_share": median(one.late_share for one in mine),
        "cached_share": median(one.cached_share for one in mine),
        "bound_ms": 1e3 * median(one.bound_s for one in mine),
        "over_bound": median(one.end_to_end_s / one.bound_s - 1 for one in mine),
        "cut_off": median(one.cut_off for one in mine),
    }


def median(values: Iterable[float]) -> float:
    """The median of what may be a generator."""
    return float(statistics.median(list(values)))
