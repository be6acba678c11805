"""What the tree, incremental prefill and early exit each save, on the embedded pair or on real
SGLang.

    python benchmarks/overlap.py [--rounds N] [--new-tokens N,N] [--clients N,N] [--question-tokens
    N] [--json] python benchmarks/overlap.py --engine sglang [--model smollm2] [--attention
    new-tokens] [--shape 3-1] python benchmarks/overlap.py --engine sglang --config FILE
    python benchmarks/overlap.py --measure chunks | lengths | prefixes
    python benchmarks/overlap.py --measure remote --shape 3-1 --chunks 32

The four settings of Faster-MoA, 5.3, take turns in every round, each with a new question; --clients
ask at a time. Outputs are drawn as the topologies say and are not ended by the model, so that their
lengths are known. With `--new-tokens free` the model ends them, and each setting of a round answers
the same real question.

    end_to_end_ms      from the request to the root's last token
    second_layer_ms    mean over the aggregators of layer two: from the end of the last precursor to
    the own end exposed_ms         the part of it before the first token: prefill, queue and KV
    transfer that nothing hides exposed_share      the same time as a mean over aggregators and
    root, by that mean in `tree`, where nothing is
                       hidden, in the same round. What a request costs with nothing left to prefill
                       stays in it
    late_share         of the tokens of the aggregators' and the root's prompts, how many were not
    in the prefix cache
                       when the last precursor had ended: what was still to be prefilled, in tokens
    cached_share       of the same tokens, how many their real request found cached
    bound_ms           the critical path if no prefill were exposed: the longest chain of a leaf's
    first token and
                       every agent's decoding, as measured in the same run
    over_bound         end_to_end_ms / bound_ms - 1

Medians over the rounds; ratios are medians of each round's ratio. `..._95` is the interval of the
column before it: of seven rounds it is the smallest and the largest.

`--engine sglang` starts the deployment configs/sglang-cpu.yaml on free ports, once
launch/sglang_cpu/environment.sh has built its environment. `--config` names another deployment with
the aliases small, medium and large: its pairs with `launch` are started, the others are expected to
run, and its cache and embedder are used. `--model` is what the pair
serves: `random` weights, `tiny`, the large model of models/, or `smollm2`, SmolLM2-135M-Instruct.

SGLang's attention on a CPU costs each prefill as if no token were cached. `--attention new-tokens`
replaces that function by one that leaves out cached tokens, as GPU kernels do.

The three sizes of a Mixture of Agents end at different times, and that is when incremental prefill
fills the next slot: the first one streams in, the others can only follow once those before them
have ended. Where one pair serves all three aliases they would all end together, so there lengths
stand for speeds: small writes half of --new-tokens, medium three quarters, large all of them.
Elsewhere every agent writes --new-tokens.

`--measure chunks` is what a prompt costs in chunks, against one pass; `lengths` how long free
outputs get by layer; `prefixes`, on real SGLang with overlap scheduling, what it saves that
proposers with one question wait for the first of them. `remote` asks each setting also with another
router's `small`, by OpenAI's API, in the place of its own; on the tiny models in float64, or by
`--engine sglang`.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from report import Row

    from benchmarks.overlap.measure import Amount
    from shell_router.api import Services
    from shell_router.config import Config
    from shell_router.topology import Topology

    Measure = Callable[[Config, Services], Awaitable[list[Row]]]

TITLES = {
    "overlap": "Overlap: settings of one question, tree {shape} and all-to-all",
    "chunks": "A prompt of 1,024 tokens, prefilled in chunks",
    "lengths": "Tokens of outputs that the model ends, tree {shape}",
    "remote": "Overlap: one model by OpenAI's API, tree {shape}",
    "prefixes": "Proposers of one question: each prefilled whole, or after the first, tree {shape}",
}
LENGTHS = {"embedded": ("128", 200), "sglang": ("64", 100)}
"""Tokens of an output and of a question; on a CPU, SGLang takes 4 s for a tree of the shorter ones.
"""
WRONG_INPUT = 2


def main() -> int:
    """Measure and print; 2 for an error that says what to do."""
    options = parser().parse_args()
    sys.path.insert(
        0, str(Path(__file__).parents[1])
    )  # `launch` is of this repository, not of the package
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    logging.basicConfig(
        level="INFO" if options.engine == "sglang" else "WARNING", format="%(message)s"
    )
    import uvloop
    from report import report

    from benchmarks.overlap.engines import (
        CpuPair,
        embedded_pairs,
        sglang_deployment,
        tiny_models,
    )
    from shell_router.errors import ShellRouterError
    from shell_router.standins.embedded.settings import EmbeddedSection

    try:
        pair = CpuPair(options.model, options.attention, options.flags)
        if options.engine == "sglang":
            config = sglang_deployment(options.config, pair)
        elif options.measure == "remote":
            config = tiny_models(EmbeddedSection(dtype="float64"))
        else:
            config = embedded_pairs()
        engine, rows = uvloop.run(measured(config, measure_of(options)))
    except ShellRouterError as error:
        print(f"overlap.py: {error}", file=sys.stderr)
        return WRONG_INPUT
    report(
        TITLES[options.measure].format(shape=options.shape),
        rows,
        engine=engine,
        simulated=False,
        as_json=options.json,
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """All options."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--measure", choices=tuple(TITLES), default="overlap")
    found.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    found.add_argument(
        "--config", type=Path, metavar="FILE", help="a deployment, with --engine sglang"
    )
    found.add_argument(
        "--model", choices=("random", "tiny", "smollm2"), default="random", help="without --config"
    )
    found.add_argument(
        "--attention",
        choices=("released", "new-tokens"),
        default="released",
        help="without --config",
    )
    found.add_argument(
        "--flags", default="", help="further flags of the SGLang engines: '--dtype bfloat16'"
    )
    found.add_argument("--rounds", type=int, default=7)
    found.add_argument(
        "--settings",
        default="1,2,3,4",
        help="1 all-to-all, 2 tree, 3 + incremental prefill, 4 full",
    )
    found.add_argument(
        "--new-tokens", help="lengths, or `free`; default 128, with --engine sglang 64"
    )
    found.add_argument("--clients", default="1", help="requests at a time")
    found.add_argument("--shape", default="9-3-1", help="the tree's agents by layer")
    found.add_argument(
        "--chunks",
        default="",
        help="also tree + incremental prefill in chunks of these sizes: 16,64",
    )
    found.add_argument("--question-tokens", type=int, help="default 200, with --engine sglang 100")
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    return found


def measure_of(options: argparse.Namespace) -> "Measure":
    """What to do with the running engines."""
    from benchmarks.overlap.engines import flush, with_remote
    from benchmarks.overlap.measure import (
        SETTINGS,
        beside_remote,
        chunk_costs,
        four_settings,
        free_lengths,
        in_chunks,
        measured_rows,
        output_lengths,
        shared_prefixes,
    )
    from shell_router.cli.options import split_values

    clients, chosen = (
        split_values(options.clients, int),
        {SETTINGS[n - 1] for n in split_values(options.settings, int)},
    )

    fixed = split_values(options.chunks, int) if options.chunks else ()

    def settings_of(config: "Config", new_tokens: int | None) -> "Mapping[str, Topology]":
        return four_settings(
            output_lengths(config, new_tokens), [int(agents) for agents in options.shape.split("-")]
        )

    async def overlap(config: "Config", services: "Services") -> "list[Row]":
        rows: list[Row] = []
        for amount in amounts(options):
            settings = settings_of(config, amount.new_tokens)
            asked = {
                name: topology for name, topology in settings.items() if name in chosen | {"tree"}
            }
            asked |= in_chunks(settings["tree"], fixed)
            if "remote" in services.models:
                asked |= beside_remote(asked)
            forget = None if amount.new_tokens else lambda: flush(config)
            rows += await measured_rows(services, asked, amount, forget)
        return rows

    async def remote(config: "Config", services: "Services") -> "list[Row]":
        async with with_remote(config, services) as mixed:
            return await overlap(config, mixed)

    async def lengths(config: "Config", services: "Services") -> "list[Row]":
        return await free_lengths(
            services, settings_of(config, None)["tree"], options.rounds, max(clients)
        )

    async def chunks(_config: "Config", services: "Services") -> "list[Row]":
        return await chunk_costs(services, options.rounds)

    async def prefixes(config: "Config", services: "Services") -> "list[Row]":
        rows: list[Row] = []
        for amount in amounts(options):
            tree = settings_of(config, amount.new_tokens)["tree"]
            rows += await shared_prefixes(services, tree, amount)
        return rows

    measures = {"overlap": overlap, "lengths": lengths, "chunks": chunks}
    measures |= {"prefixes": prefixes, "remote": remote}
    return measures[options.measure]


def amounts(options: argparse.Namespace) -> "Iterator[Amount]":
    """Every length with every number of clients."""
    from benchmarks.overlap.measure import Amount
    from shell_router.cli.options import split_values

    new_tokens, question_tokens = LENGTHS[options.engine]
    for length in split_values(options.new_tokens or new_tokens):
        for clients in split_values(options.clients, int):
            tokens = None if length == "free" else int(length)
            yield Amount(
                options.rounds, tokens, options.question_tokens or question_tokens, clients
            )


async def measured(config: "Config", measure: "Measure") -> "tuple[str, list[Row]]":
    """What ran, in words, and the rows. SIGTERM stops all that was started."""
    from benchmarks.overlap.engines import engine_words, running_deployment

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with running_deployment(config) as services:
        return await engine_words(config), await measure(config, services)


if __name__ == "__main__":
    sys.exit(main())
