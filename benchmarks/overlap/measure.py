"""Faster-MoA's four settings, asked in turn, and their figures."""

import asyncio
import logging
import math
import random
import re
import statistics
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.report import Row
from shell_router.api import Services
from shell_router.config import Config
from shell_router.core.engine import Generation, Tokenizer
from shell_router.early_exit.settings import EarlyExit
from shell_router.engines.sglang import SglangPair
from shell_router.errors import ConfigError
from shell_router.lab.simulation.summary import Figures, compute_figures
from shell_router.moa.requests import MoaRequest
from shell_router.telemetry import Trace
from shell_router.topology import Agent, Prefill, Topology, parse_topology

log = logging.getLogger(__name__)

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
QUESTIONS = Path(__file__).with_name("questions.txt")
SHARED_PAIR_LENGTHS = {"small": 0.5, "medium": 0.75, "large": 1.0}
FREE_LIMIT = 1024
WARM_TOKENS = 32
SETTINGS = ("all-to-all", "tree", "tree + incremental prefill", "full")
CONFIDENCE = 0.95
CHUNKS = (32, 64, 128, 256, 512)
CHUNKED_PROMPT = 1024

Sampling = Mapping[str, Any]


def tokens_by_model(config: Config, new_tokens: int) -> Mapping[str, int]:
    """Tokens that an agent of each model writes: `new_tokens`, or, where one pair serves all, less
    for the smaller.
    """
    first, *others = config.models.values()
    if any(one != first for one in others):
        return dict.fromkeys(config.models, new_tokens)
    return {
        alias: max(1, int(SHARED_PAIR_LENGTHS.get(alias, 1.0) * new_tokens))
        for alias in config.models
    }


def output_lengths(config: Config, new_tokens: int | None) -> Mapping[str, Sampling]:
    """What fixes the length of an output, by alias; None leaves its end to the model, within a
    limit.
    """
    if new_tokens is None:
        return {alias: {"max_new_tokens": FREE_LIMIT} for alias in config.models}
    lengths = tokens_by_model(config, new_tokens)
    return {alias: fixed_length(tokens) for alias, tokens in lengths.items()}


def fixed_length(tokens: int) -> Sampling:
    """What makes an output as long as that."""
    return {"max_new_tokens": tokens, "ignore_eos": True}


def four_settings(
    lengths: Mapping[str, Sampling], shape: Sequence[int] = (9, 3, 1)
) -> Mapping[str, Topology]:
    """The settings by name; an agent's output is as long as `lengths` says for its model's alias.

    `shape` is the tree's agents by layer; all-to-all has as many aggregators as proposers. Raises
    ConfigError where one of the topologies' aliases is missing.
    """
    tree = shaped("tree-9-3-1.yaml", shape, lengths)
    dense = shaped("all-to-all-9-9-1.yaml", [*[shape[0]] * (len(shape) - 1), shape[-1]], lengths)
    topologies = (
        setting(dense, lengths, incremental=False, early_exit=False),
        setting(tree, lengths, incremental=False, early_exit=False),
        setting(tree, lengths, incremental=True, early_exit=False),
        setting(tree, lengths, incremental=True, early_exit=True),
    )
    return dict(zip(SETTINGS, topologies, strict=True))


def shaped(file: str, shape: Sequence[int], models: Iterable[str]) -> Topology:
    """One of the shipped topologies, with other numbers of agents."""
    text = (TOPOLOGIES / file).read_text(encoding="utf-8")
    return parse_topology(
        re.sub(r"shape: .*", f"shape: {list(shape)}", text), source=file, models=set(models)
    )


def in_chunks(tree: Topology, chunks: Sequence[int]) -> Mapping[str, Topology]:
    """The tree with incremental prefill in chunks of fixed sizes, by name."""
    return {
        f"in chunks of {tokens}": replace(tree, prefill=Prefill(chunk_tokens=tokens))
        for tokens in chunks
    }


def beside_remote(settings: Mapping[str, Topology]) -> Mapping[str, Topology]:
    """The settings by name, with `remote` in the place of `small`."""
    return {
        f"{name}, one remote": replace(
            topology,
            agents={
                agent.id: replace(agent, model="remote") if agent.model == "small" else agent
                for agent in topology.agents.values()
            },
        )
        for name, topology in settings.items()
    }


def setting(
    topology: Topology, lengths: Mapping[str, Sampling], *, incremental: bool, early_exit: bool
) -> Topology:
    """`topology` with mechanisms switched on or off."""
    gate = EarlyExit() if early_exit else None
    return replace(
        topology,
        agents={
            name: writing(agent, lengths[agent.model]) for name, agent in topology.agents.items()
        },
        clusters=tuple(replace(cluster, early_exit=gate) for cluster in topology.clusters),
        prefill=Prefill(incremental=incremental),
    )


def writing(agent: Agent, length: Sampling) -> Agent:
    """`agent` with an output of that length, drawn as its topology says. Drafts are measured by
    drafts.py.
    """
    return replace(agent, sampling={**agent.sampling, **length}, drafts=False)


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


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured: rounds after one that warms up, clients at a time, lengths in tokens.

    Without `new_tokens` the model ends its outputs, and the questions are those of questions.txt.
    """

    rounds: int
    new_tokens: int | None
    question_tokens: int
    clients: int = 1


async def measured_rows(
    services: Services,
    settings: Mapping[str, Topology],
    amount: Amount,
    forget: Callable[[], Awaitable[None]] | None = None,
) -> list[Row]:
    """One row per setting; the settings take turns, and each round begins with another one.

    Outputs of fixed length answer new questions each time; free ones the same question in each
    setting of a round, and `forget` then empties the engines' prefix caches before each turn.
    """
    found: dict[str, list[Figures]] = {name: [] for name in settings}
    asked = Questions(amount, next(model.tokenizer for model in services.models.values()))
    for round_number in range(amount.rounds + 1):
        turns = list(settings.items())
        first = round_number % len(turns)
        for name, topology in turns[first:] + turns[:first]:
            if forget is not None:
                await forget()
            asked_now = topology if round_number else short(topology)  # the first round warms up
            traces = await asyncio.gather(
                *(
                    run(
                        services,
                        asked_now,
                        f"{name}-{round_number}-{client}",
                        asked.of(round_number, client),
                    )
                    for client in range(amount.clients)
                )
            )
            figures = mean_of([compute_figures(topology, trace) for trace in traces])
            log.info(
                "round %d, %s: %.1f s, exposed %.2f s, late %.2f, updates: %s",
                *(
                    round_number,
                    name,
                    figures.end_to_end_s,
                    figures.reader_exposed_s,
                    figures.late_share,
                ),
                ", ".join(updates_of(traces)) or "none",
            )
            if round_number:
                found[name].append(figures)
    length = "free" if amount.new_tokens is None else str(amount.new_tokens)
    return [
        {"new_tokens": length, "clients": amount.clients, **row(name, found)} for name in settings
    ]


def short(topology: Topology) -> Topology:
    """`topology` with outputs of a few tokens."""
    agents = {
        name: replace(agent, sampling=_shorter(agent.sampling))
        for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents)


def _shorter(sampling: Sampling) -> Sampling:
    return {**sampling, "max_new_tokens": min(WARM_TOKENS, sampling["max_new_tokens"])}


class Questions:
    """The questions of each round and client."""

    def __init__(self, amount: Amount, tokenizer: Tokenizer) -> None:
        self._amount = amount
        self._tokenizer = tokenizer
        self._words = (
            random.Random()
        )  # by the system: pairs that run already may have seen those of an earlier run

    def of(self, round_number: int, client: int) -> str:
        """Drawn anew at each call, unless outputs are free."""
        if self._amount.new_tokens is not None:
            return drawn_question(self._words, self._amount.question_tokens, self._tokenizer)
        questions = real_questions()
        return questions[(round_number * self._amount.clients + client) % len(questions)]


def real_questions() -> list[str]:
    """One a line."""
    return QUESTIONS.read_text(encoding="utf-8").splitlines()


def drawn_question(words: random.Random, tokens: int, tokenizer: Tokenizer) -> str:
    """Words that are about `tokens` tokens."""
    drawn = words.choices(WORDS, k=tokens)
    tokens_per_word = len(tokenizer.encode(" ".join(drawn))) / len(drawn)
    return " ".join(drawn[: max(1, round(tokens / tokens_per_word))])


async def run(
    services: Services, topology: Topology, run_id: str, question: str
) -> Mapping[str, Any]:
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
    trace.close(services.clock(), "finished")
    return trace.as_json()


def updates_of(traces: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Tokens and seconds of each update, and what its prompt waited for."""
    for trace in traces:
        for name, agent in trace["agents"].items():
            ended_s = max(
                (trace["agents"][precursor]["ended_s"] for precursor in agent["precursors"]),
                default=0,
            )
            spans = [span for span in agent["spans"] if span["name"] == "prefill_increment"]
            for span in spans:
                yield (
                    f"{name} {span['prompt_tokens']} in "
                    f"{span['start_s']:.1f}-{span['end_s']:.1f} of {ended_s:.1f} s"
                )


def mean_of(figures: Sequence[Figures]) -> Figures:
    """The mean of each figure, over those runs that have it."""
    known = {
        field.name: [value for one in figures if (value := getattr(one, field.name)) is not None]
        for field in fields(Figures)
    }
    return Figures(
        **{name: statistics.mean(values) if values else None for name, values in known.items()}
    )


def row(name: str, found: Mapping[str, Sequence[Figures]]) -> Row:
    """One setting's medians, and the intervals of its paired ratios."""
    mine, tree = found[name], found["tree"]
    to_tree = [a.end_to_end_s / b.end_to_end_s for a, b in zip(mine, tree, strict=True)]
    exposed = [a.reader_exposed_s / b.reader_exposed_s for a, b in zip(mine, tree, strict=True)]
    dense = found.get("all-to-all")
    to_dense = (
        [a.end_to_end_s / b.end_to_end_s for a, b in zip(mine, dense, strict=True)] if dense else []
    )
    return {
        "setting": name,
        "end_to_end_ms": 1e3 * median(one.end_to_end_s for one in mine),
        "vs_all_to_all": median(to_dense) if to_dense else None,
        "all_to_all_95": interval(to_dense) if to_dense else None,
        "vs_tree": median(to_tree),
        "tree_95": interval(to_tree),
        "second_layer_ms": 1e3 * median(one.second_layer_s for one in mine),
        "second_vs_tree": median(
            a.second_layer_s / b.second_layer_s for a, b in zip(mine, tree, strict=True)
        ),
        "exposed_ms": 1e3 * median(one.exposed_s for one in mine),
        "exposed_share": median(exposed),
        "exposed_95": interval(exposed),
        "late_share": median(one.late_share for one in mine),
        "cached_share": median(one.cached_share for one in mine),
        "bound_ms": 1e3 * median(one.bound_s for one in mine),
        "over_bound": median(one.end_to_end_s / one.bound_s - 1 for one in mine),
        "cut_off": median(one.cut_off for one in mine),
    }


def median(values: Iterable[float]) -> float:
    """The median of what may be a generator."""
    return float(statistics.median(list(values)))


def interval(values: Sequence[float]) -> str:
    """`0.94-0.97`: the narrowest pair of ordered values that holds the true median in 95 % of all
    such samples.

    That needs no distribution; of fewer than six values the smallest and the largest, which say
    less.
    """
    ordered, count = sorted(values), len(values)
    drop = 0
    while 2 * drop + 2 < count and _outside(count, drop + 1) <= 1 - CONFIDENCE:
        drop += 1
    return f"{ordered[drop]:.3f}-{ordered[count - 1 - drop]:.3f}"


def _outside(count: int, drop: int) -> float:
    """How often the median lies outside what is left of `count` values without `drop` at each
    end."""
    return 2 * sum(math.comb(count, below) for below in range(drop + 1)) / 2**count


async def chunk_costs(services: Services, rounds: int) -> list[Row]:
    """What a prompt costs that is prefilled in chunks, against one pass over it; medians over the
    rounds.
    """
    model = next(iter(services.models.values()))
    words, spent_s = random.Random(), dict[int, list[list[float]]]()
    vocabulary = sorted({token for word in WORDS for token in model.tokenizer.encode(f" {word}")})
    for round_number in range(rounds + 1):
        for chunk in (1, *CHUNKS, CHUNKED_PROMPT):
            ids = words.choices(vocabulary, k=CHUNKED_PROMPT if chunk > 1 else 1)
            took_s = []
            for end in range(chunk, len(ids) + 1, chunk):
                started_s = services.clock()
                request = f"chunks-{round_number}-{chunk}"
                await model.engine.prefill(
                    Generation(f"{request}.p{end}", ids[:end], affinity=request)
                )
                took_s.append(services.clock() - started_s)
            if round_number:
                spent_s.setdefault(chunk, []).append(took_s)
    whole = [took_s[0] for took_s in spent_s[CHUNKED_PROMPT]]
    return [
        {
            "chunk_tokens": chunk,
            "chunks": len(runs[0]),
            "total_ms": 1e3 * median(map(sum, runs)),
            "vs_one_pass": median(sum(a) / b for a, b in zip(runs, whole, strict=True))
            if chunk > 1
            else None,
            "first_ms": 1e3 * median(took_s[0] for took_s in runs),
            "last_ms": 1e3 * median(took_s[-1] for took_s in runs),
        }
        for chunk, runs in spent_s.items()
    ]


async def shared_prefixes(services: Services, tree: Topology, amount: Amount) -> list[Row]:
    """What the proposers' common question costs if each is prefilled whole, and if the router
    waits for the first; the two take turns, each with a new question. Raises ConfigError.
    """
    model = next(iter(services.models.values()))
    servers = [
        only
        for served in services.models.values()
        if isinstance(served.engine, SglangPair)
        for only in served.engine.fleet.prefill_only.values()
    ]
    if not servers:
        raise ConfigError(
            "No SGLang pair serves the models: embedded engines share prefixes by themselves.",
            remedy="Use --engine sglang.",
        )
    words = random.Random()
    found: dict[str, list[Mapping[str, Any]]] = {"each by itself": [], "after the first": []}
    for round_number in range(amount.rounds + 1):
        order = list(found)
        for name in order[round_number % 2 :] + order[: round_number % 2]:
            for server in servers:
                server.overlaps_passes = name == "after the first"
            label = f"{name}-{round_number}"
            asked = (
                run(
                    services,
                    tree if round_number else short(tree),
                    f"{label}-{client}",
                    drawn_question(words, amount.question_tokens, model.tokenizer),
                )
                for client in range(amount.clients)
            )
            traces = await asyncio.gather(*asked)
            if round_number:
                found[name].append(_first_layer(tree, traces))
    base = found["each by itself"]
    rows: list[Row] = []
    for name, rounds in found.items():
        row: Row = {"setting": name, "clients": amount.clients}
        for figure in base[0]:
            ratios = [one[figure] / other[figure] for one, other in zip(rounds, base, strict=True)]
            row[figure] = median(one[figure] for one in rounds)
            row[f"{figure}_ratio"] = median(ratios)
            row[f"{figure}_95"] = interval(ratios)
        rows.append(row)
    return rows


def _first_layer(tree: Topology, traces: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """The proposers' prefilled tokens and times to their first token, and the whole requests'."""
    proposers = [trace["agents"][name] for trace in traces for name in tree.layers[0]]
    return {
        "prefilled_tokens": sum(one["prompt_tokens"] - one["cached_tokens"] for one in proposers),
        "first_token_ms": 1e3 * statistics.mean(one["exposed_prefill_s"] for one in proposers),
        "end_to_end_ms": 1e3 * statistics.mean(trace["duration_s"] for trace in traces),
    }


async def free_lengths(services: Services, tree: Topology, rounds: int, clients: int) -> list[Row]:
    """Tokens of prompts and outputs by layer where the model ends its outputs; one question a round
    and client.
    """
    *between, _ = tree.layers
    layers = dict(zip(("proposer", "aggregator"), between, strict=False)) | {"root": [tree.root.id]}
    names = {agent: name for name, layer in layers.items() for agent in layer}
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in layers}
    limit = asyncio.Semaphore(clients)

    async def ask(number: int, question: str) -> None:
        async with limit:
            trace = await run(services, tree, f"length-{number}", question)
        for agent, facts in trace["agents"].items():
            found[names[agent]].append(facts)

    async with asyncio.TaskGroup() as group:
        for number, question in enumerate(real_questions()[: rounds * clients]):
            group.create_task(ask(number, question))
    return [length_row(name, agents) for name, agents in found.items()]


def length_row(name: str, agents: Sequence[Mapping[str, Any]]) -> Row:
    """Quantiles of one layer's outputs, the share that a limit ended, and the median prompt."""
    lengths = [agent["decoded_tokens"] for agent in agents]
    cuts = statistics.quantiles(lengths, n=20, method="inclusive")
    quantiles = {f"p{5 * at}": cuts[at - 1] for at in (1, 2, 5, 10, 15, 18, 19)}
    return {
        "agent": name,
        "outputs": len(lengths),
        "mean": statistics.mean(lengths),
        **quantiles,
        "max": max(lengths),
        "cut_share": statistics.mean(agent["reason"] == "length" for agent in agents),
        "prompt_p50": median(agent["prompt_tokens"] for agent in agents),
    }
