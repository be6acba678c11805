"""Where experts live: Gimbal's algorithms and ours, compared with SGLang's own EPLB, on the same
records.

    python benchmarks/expert_placement.py [--layers N] [--tokens N] [--gpus 2,4,8] [--json]
    python benchmarks/expert_placement.py --sglang [--rounds N] [--json]

Four models. `tiny qwen3-moe` was recorded on real SGLang on a CPU: 4 layers of 16 experts with
random weights, top-4. The others are drawn (`drawn.py`), 48 layers of 128 experts, top-8, like
Qwen3-30B-A3B: `sparse pairs`, where a quarter of the experts has one strong follower, as in
Gimbal's figures 3 and 4; `topics`, where each of 8 kinds of text prefers experts of its own; and
`even`, with neither, where there is nothing to find. Each is placed by one record and measured on
it, and on a second one of other tokens (`fresh_`).

    over_even_%   how far the fullest GPU of a layer is above the mean, a mean over the layers
    worst_%       the same of the worst layer
    D_%           the paper's: how far any GPU's load is from the ideal one, as a share of that (8,
    9) traffic_%     transitions between layers that lead to another GPU (11)
    s             seconds for the placement

`milp` is left to the tests: it is hopeless at these sizes.

With --sglang real SGLang serves a mixture of experts of random weights on two ranks, one CPU core
each, the popular half of each layer's experts on the first. Its balancer moves them while it
serves. Milliseconds per token of a prompt of 2000 tokens and per decode step of 16 sequences:
medians of rounds and their middle half, before SGLang first places experts and after it. Shares and
traffic are those of the tokens before, and of all tokens from then to the second time.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Row, report

from benchmarks.expert_placement.drawn import Routing, drawn
from shell_router.experts.placement import ALGORITHMS, ExpertRecord
from shell_router.experts.placement.files import read_record
from shell_router.experts.placement.records import measure_placement

TITLE = "Expert placement"
RECORDED = Path(__file__).parent / "expert_placement"
CASES = ("contiguous", "eplb", "gimbal", "swap")


class Model(NamedTuple):
    """What is placed by `record`, and measured on `fresh` too."""

    name: str
    record: ExpertRecord
    fresh: ExpertRecord


def main() -> None:
    """Place everything and print the table; with `--json` the last line is one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48, help="of the drawn records")
    parser.add_argument("--tokens", type=int, default=10_000, help="of the drawn records")
    parser.add_argument("--gpus", default="2,4,8", help="numbers of GPUs")
    parser.add_argument(
        "--sglang", action="store_true", help="experts that move while real SGLang serves"
    )
    parser.add_argument(
        "--rounds", type=int, default=12, help="of each phase, with --sglang (default 12)"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if options.sglang:
        _serve(options)
        return
    gpus = [int(number) for number in options.gpus.split(",")]
    rows = [
        row
        for model in models(options.layers, options.tokens)
        for number in gpus
        for row in _rows(model, number)
    ]
    report(
        TITLE,
        rows,
        engine="one model recorded on real SGLang, three drawn",
        simulated=True,
        as_json=options.json,
    )


def _serve(options: argparse.Namespace) -> None:
    from benchmarks.expert_placement.served import rows

    with TemporaryDirectory(prefix="expert-placement-") as folder:
        found = [dict(row) for row in rows(Path(folder), options.rounds)]
    report(
        f"{TITLE} while SGLang serves",
        found,
        engine="two ranks of SGLang",
        simulated=False,
        as_json=options.json,
    )


def models(layers: int, tokens: int) -> Iterator[Model]:
    """All four."""
    recorded = [read_record(RECORDED / f"tiny-qwen3-moe-{number}.npz") for number in (1, 2)]
    yield Model("tiny qwen3-moe", *recorded)
    for name, routing in {
        "sparse pairs": Routing(layers),
        "topics": Routing(layers, topics=8, topical=3.0),
        "even": Routing(layers, linked=0.0, skew=0.1),
    }.items():
        yield Model(name, drawn(routing, tokens), drawn(routing, tokens, sample=1))


def _rows(model: Model, gpus: int) -> Iterator[Row]:
    for algorithm in CASES:
        started_s = time.perf_counter()
        placement = ALGORITHMS[algorithm](model.record, gpus)
        took_s = time.perf_counter() - started_s
        seen, fresh = (
            measure_placement(model.record, placement),
            measure_placement(model.fresh, placement),
        )
        yield {
            "model": model.name,
            "GPUs": gpus,
            "algorithm": algorithm,
            "over_even_%": 100 * (seen.balance - 1),
            "worst_%": 100 * (seen.worst_balance - 1),
            "D_%": 100 * seen.deviation,
            "traffic_%": 100 * seen.traffic,
            "fresh_over_even_%": 100 * (fresh.balance - 1),
            "fresh_traffic_%": 100 * fresh.traffic,
            "s": took_s,
        }


if __name__ == "__main__":
    main()
