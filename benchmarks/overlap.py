"""What the tree, incremental prefill and early exit each save, on the embedded pair or on real SGLang.

    python benchmarks/overlap.py [--rounds N] [--new-tokens N] [--question-tokens N] [--json]
    python benchmarks/overlap.py --engine sglang [--config FILE]

The four settings of Faster-MoA, 5.3, take turns in every round, each with a question nobody has asked before, one
request at a time. Outputs are drawn as the topologies say and are never ended by the model, which often has random
weights, so that their lengths are known.

    end_to_end_ms      from the request to the root's last token
    second_layer_ms    mean over the aggregators of layer two: from the end of the last precursor to the own end
    exposed_ms         the part of it before the first token: prefill, queue and KV transfer that nothing hides
    exposed_share      the same time as a mean over aggregators and root, by that mean in `tree`, where nothing is
                       hidden, in the same round. What a request costs with nothing left to prefill stays in it
    late_share         of the tokens of the aggregators' and the root's prompts, how many were not in the prefix cache
                       when the last precursor had ended: what was still to be prefilled, in tokens
    cached_share       of the same tokens, how many their real request found cached
    bound_ms           the critical path if no prefill were exposed: the longest chain of a leaf's first token and
                       every agent's decoding, as measured in the same run
    over_bound         end_to_end_ms / bound_ms - 1

Medians over the rounds; ratios are medians of each round's ratio.

`--engine sglang` starts the deployment configs/sglang-cpu.yaml on free ports, once launch/sglang_cpu/environment.sh has
built its environment. `--config` names another deployment with the aliases small, medium and large: its pairs with
`launch` are started, the others are expected to run, and its cache and embedder are used.

The three sizes of a Mixture of Agents end at different times, and that is when incremental prefill fills the next slot:
the first one streams in, the others can only follow once those before them have ended. Where one pair serves all three
aliases they would all end together, so there lengths stand for speeds: small writes half of --new-tokens, medium
three quarters, large all of them. Elsewhere every agent writes --new-tokens.
"""
# ruff: noqa: PLC0415 - NumPy reads a variable when it is loaded, and --help answers at once

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlapping.measure import Amount
    from report import Row

    from shell_router.config import Config

TITLE = "Overlap: four settings of one question, tree 9-3-1 and all-to-all 9-9-1"
LENGTHS = {"embedded": (128, 200), "sglang": (64, 100)}
"""Tokens of an output and of a question; on a CPU, SGLang takes 4 s for a tree of the shorter ones."""
WRONG_INPUT = 2


def main() -> int:
    """Measure and print; 2 for an error that says what to do."""
    options = parser().parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))  # `launch` is of this repository, not of the package
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    logging.basicConfig(level="INFO" if options.engine == "sglang" else "WARNING", format="%(message)s")
    import uvloop
    from overlapping.engines import embedded_pairs, sglang_deployment
    from overlapping.measure import Amount
    from report import report

    from shell_router.cli.arguments import whole_numbers
    from shell_router.errors import ShellRouterError

    new_tokens, question_tokens = LENGTHS[options.engine]
    chunks = whole_numbers(options.chunks) if options.chunks else ()
    amount = Amount(options.rounds, options.new_tokens or new_tokens, options.question_tokens or question_tokens)
    try:
        config = sglang_deployment(options.config) if options.engine == "sglang" else embedded_pairs()
        engine, rows = uvloop.run(measure(config, amount, chunks))
    except ShellRouterError as error:
        print(f"overlap.py: {error}", file=sys.stderr)
        return WRONG_INPUT
    report(TITLE, rows, engine=engine, simulated=False, as_json=options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """All options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    found.add_argument("--config", type=Path, metavar="FILE", help="a deployment, with --engine sglang")
    found.add_argument("--rounds", type=int, default=7)
    found.add_argument("--new-tokens", type=int, help="default 128, with --engine sglang 64")
    found.add_argument("--question-tokens", type=int, help="default 200, with --engine sglang 100")
    found.add_argument("--chunks", default="", help="also tree + incremental prefill in chunks of so many: 16,64")
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    return found


async def measure(config: "Config", amount: "Amount", chunks: "Sequence[int]") -> tuple[str, "list[Row]"]:
    """What ran, in words, and one row per setting. SIGTERM stops all that was started."""
    from overlapping.engines import engine_words, running_deployment
    from overlapping.measure import measured_rows
    from overlapping.settings import four_settings, in_chunks, tokens_by_model

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    settings = dict(four_settings(tokens_by_model(config, amount.new_tokens)))
    settings |= in_chunks(settings["tree"], chunks)
    async with running_deployment(config) as services:
        return await engine_words(config), await measured_rows(services, settings, amount)


if __name__ == "__main__":
    sys.exit(main())
