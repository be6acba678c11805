"""What early exits cost in right answers, at the same share of exits.

    python benchmarks/early_exit_answers.py [--table exits|growth] [--learn N] [--ask N] [--json]

The tiny models answer as the three proposers of a tree 3-1, whose root is the large one. Thresholds
are chosen on calibration questions, and judged on others. The outputs are real. Their times are
virtual: each model's seconds per token and for a prompt as configs/engines/embedded.yaml has them,
one question at a time, and a judgement costs nothing.

    exits     questions on which the unfinished proposers are cut off, in percent
    points    right answers less those without exit, in percent of the questions
    changed   answers that differ from those without exit, in percent
    latency   mean, relative to no exit

The second table is of the tree that grows from a first answer, the large model's at temperature 0.
It is forwarded where it is sure; otherwise the root reads it before the three proposers' outputs.

    unsure    questions on which the tree grows, in percent
    changed   answers that differ from those of trees that always grow, in percent
    tokens    decoded per question, relative to the tree without a first answer
"""

import argparse
import heapq
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from report import Row, report
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "models"))

from training.lessons import Lessons  # noqa: E402
from training.sampling import Written, write  # noqa: E402

from shell_router.early_exit.algorithm1 import Confidence, Features, features  # noqa: E402
from shell_router.early_exit.answers import cast_ballot  # noqa: E402
from shell_router.early_exit.evidence import LEVELS, ExitEvidence, Judged  # noqa: E402
from shell_router.early_exit.settings import EarlyExit  # noqa: E402

MODELS = ("small", "medium", "large")
SHARES = (0.2, 0.4)
ALLOWED_PERCENT = (1.0, 2.0, 5.0)
POLICIES = {"literal Q": "threshold", "monotone": "monotone", "in flight": "in_flight"}


@dataclass(frozen=True)
class Exit:
    """A judgement with a higher score than all before, and the proposers that had ended."""

    score: float
    at_s: float
    completed: tuple[str, ...]
    answer: str | None


@dataclass
class Case:
    """A question, its proposers' outputs, and what its root answers to each set of them."""

    question: str
    answer: str
    written: Mapping[str, Written]
    texts: Mapping[str, str]
    states: Mapping[str, Features]
    ends_s: Mapping[str, float]
    first: Written
    first_s: float
    roots: dict[tuple[str, ...], tuple[str, float, int]] = field(default_factory=dict)


class World:
    """The tiny models and their virtual times."""

    def __init__(self) -> None:
        folder = ROOT / "models"
        self.tokenizer = Tokenizer.from_file(str(folder / "large" / "tokenizer.json"))
        self.lessons = Lessons(self.tokenizer)
        self.networks = {
            name: Qwen3ForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
            for name in MODELS
        }
        costs = yaml.safe_load((ROOT / "configs/engines/embedded.yaml").read_text())["models"]
        self.first_s = {name: costs[name]["prefill"]["forward_s"] for name in MODELS}
        self.token_s = {name: costs[name]["decode"]["step_s"] for name in MODELS}

    def propose(self, file: Path, count: int) -> list[Case]:
        """Let all models answer the last `count` questions of the file."""
        items = [json.loads(line) for line in file.read_text().splitlines()][-count:]
        prompts = [self.lessons.question(item["question"]) for item in items]
        proposer = {"temperature": 0.7, "top_p": 0.95, "seed": 1}
        written = {
            name: write(network, prompts, **proposer) for name, network in self.networks.items()
        }
        first = write(self.networks["large"], prompts, temperature=0)
        cases = []
        for number, item in enumerate(items):
            outputs = {name: written[name][number] for name in MODELS}
            cases.append(
                Case(
                    item["question"],
                    item["answer"],
                    outputs,
                    {name: self.tokenizer.decode(one.ids) for name, one in outputs.items()},
                    {name: features(self._embed(one.ids)) for name, one in outputs.items()},
                    {name: self._end_s(name, len(one.logprobs)) for name, one in outputs.items()},
                    first[number],
                    self._end_s("large", len(first[number].logprobs)),
                )
            )
        return cases

    def _end_s(self, model: str, tokens: int) -> float:
        return float(self.first_s[model] + tokens * self.token_s[model])

    def count_tokens(self, model: str, seconds: float) -> int:
        """Return how many tokens the model decodes in that time from its start."""
        return max(0, int((seconds - self.first_s[model]) / self.token_s[model]))

    @torch.inference_mode()
    def _embed(self, ids: Sequence[int]) -> "torch.Tensor":
        states = self.networks["small"].model(input_ids=torch.tensor([list(ids) or [0]]))
        return states.last_hidden_state[0].numpy()

    def aggregate(self, wanted: Sequence[tuple[Case, tuple[str, ...]]]) -> None:
        """Let the root answer each question from each set of proposers."""
        new = [(case, read) for case, read in wanted if read not in case.roots]
        prompts = [
            self.lessons.drafts(
                case.question, [{"first": case.first, **case.written}[name].ids for name in read]
            )
            for case, read in new
        ]
        for (case, read), one in zip(
            new, write(self.networks["large"], prompts, temperature=0), strict=True
        ):
            took_s = self._end_s("large", len(one.logprobs))
            case.roots[read] = self.tokenizer.decode(one.ids), took_s, len(one.logprobs)

    def replay(self, case: Case, settings: EarlyExit) -> list[Exit]:
        """Return the judgements with a new highest score while a proposer still writes."""
        gate = settings.new_gate(MODELS)
        sums = {name: Confidence() for name in MODELS}
        shown = dict.fromkeys(MODELS, "")
        completed: list[str] = []
        exits: list[Exit] = []
        moments = [
            (self._end_s(name, number + 1), name, number)
            for name in MODELS
            for number in range(len(case.written[name].logprobs))
        ]
        heapq.heapify(moments)
        while moments:
            at_s, name, number = heapq.heappop(moments)
            output = case.written[name]
            sums[name].add([output.logprobs[number]])
            if settings.needs.reads_streams:
                text = self.tokenizer.decode(output.ids[: number + 1])
                gate.add_text(name, text[len(shown[name]) :], sums[name].value or 0.0)
                shown[name] = text
            is_end = number + 1 == len(output.logprobs)
            if is_end:
                completed.append(name)
                gate.add_output(name, case.texts[name], output.confidence, case.states[name])
            running = [other for other in MODELS if other not in completed]
            if not running or not (is_end or (settings.needs.reads_streams and completed)):
                continue
            judged = gate.judge(running, lambda: 1.0)
            if judged is not None and judged.score is not None:
                score = judged.score.probability
                if score > max((exit.score for exit in exits), default=0.0):
                    read = tuple(each for each in MODELS if each in completed)
                    exits.append(Exit(score, at_s, read, judged.answer))
        return exits


Paths = Sequence[list[Exit]]


def find_exit(path: Sequence[Exit], threshold: float) -> Exit | None:
    """Return the first judgement that reaches the threshold."""
    return next((exit for exit in path if exit.score >= threshold), None)


def choose_by_share(paths: Paths, share: float) -> float:
    """Return the threshold at which this share of the questions exits."""
    highest = sorted((path[-1].score if path else 0.0 for path in paths), reverse=True)
    return highest[round(share * len(highest))]


def calibrate(
    cases: Sequence[Case], paths: Paths, percent: float, read: tuple[str, ...] = MODELS
) -> float:
    """Return the threshold that the router calibrates on complete runs of these questions."""
    evidence = ExitEvidence()
    key = Judged("tree", MODELS, EarlyExit("in_flight", max_changed_percent=percent), 0)
    for case, path in zip(cases, paths, strict=True):
        watched: list[str | None] = []
        for exit in path:
            watched += [exit.answer] * (int(exit.score * LEVELS) + 1 - len(watched))
        evidence.observe(key, watched, [read_answer(case.roots[read][0])], percent / 100)
    return evidence.find_threshold(key)


def read_answer(text: str) -> str:
    """Return the answer that a text states, or else the whole text."""
    return cast_ballot("", text, 1.0, is_cut=False).answer or ""


def measure(world: World, name: str, cases: Sequence[Case], exits: Sequence[Exit | None]) -> Row:
    """Compare the answers of the exits with those of complete runs."""
    world.aggregate(
        [(case, exit.completed) for case, exit in zip(cases, exits, strict=True) if exit]
    )
    right = complete_right = changed = 0
    seconds = complete_s = 0.0
    for case, exit in zip(cases, exits, strict=True):
        text, root_s, _ = case.roots[MODELS]
        whole_s = max(case.ends_s.values()) + root_s
        said = read_answer(text)
        complete_right += said == case.answer.casefold()
        complete_s += whole_s
        if exit is not None:
            text, root_s, _ = case.roots[exit.completed]
            whole_s = exit.at_s + root_s
        changed += read_answer(text) != said
        right += read_answer(text) == case.answer.casefold()
        seconds += whole_s
    percent = 100 / len(cases)
    return {
        "gate": name,
        "exits %": f"{percent * sum(exit is not None for exit in exits):.1f}",
        "right %": f"{percent * right:.1f}",
        "points": f"{percent * (right - complete_right):+.1f}",
        "changed %": f"{percent * changed:.1f}",
        "latency": f"{seconds / complete_s:.2f}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=("exits", "growth"), help="only this one")
    parser.add_argument("--learn", type=int, default=1000)
    parser.add_argument("--ask", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    how: dict[str, Any] = {"engine": "tiny models", "simulated": True, "as_json": options.json}
    world = World()
    learned = world.propose(ROOT / "models/data/calibration.jsonl", options.learn)
    asked = world.propose(ROOT / "models/data/test.jsonl", options.ask)
    world.aggregate([(case, MODELS) for case in (*learned, *asked)])
    about = f"{len(asked)} questions, thresholds from {len(learned)} others"
    if options.table != "growth":
        rows = compare_exits(world, learned, asked)
        report(f"Early exits, {about}", rows, **how)
    if options.table != "exits":
        rows = compare_growth(world, learned, asked)
        report(f"Trees that grow from a first answer, {about}", rows, **how)


def compare_exits(world: World, learned: Sequence[Case], asked: Sequence[Case]) -> list[Row]:
    """Compare the gates."""
    rows = [measure(world, "none", asked, [None] * len(asked))]
    rows.append(measure(world, "paper: drawn by Q", asked, draw_exits(world, asked)))
    for name, policy in POLICIES.items():
        settings = EarlyExit(policy)
        known = [world.replay(case, settings) for case in learned]
        new = [world.replay(case, settings) for case in asked]

        def add(label: str, threshold: float, new: Paths = new, name: str = name) -> None:
            label = f"{name}, {label}: {threshold:.2f}"
            rows.append(measure(world, label, asked, [find_exit(path, threshold) for path in new]))

        for share in SHARES:
            add(f"{share:.0%} exit", choose_by_share(known, share))
        for percent in ALLOWED_PERCENT:
            add(f"{percent:g} in 100 may change", calibrate(learned, known, percent))
    return rows


def draw_exits(world: World, cases: Sequence[Case]) -> list[Exit | None]:
    """Return the exits of the paper's gate after the second output, drawn with probability Q."""
    draw = random.Random(0).random
    exits = []
    for case in cases:
        path = world.replay(case, EarlyExit("paper"))
        exits.append(path[0] if path and draw() < path[0].score else None)
    return exits


GROWN = ("first", *MODELS)
"""The outputs that the root of a grown tree reads."""


@dataclass(frozen=True)
class Growth:
    """How the first answer and the tree run; it is forwarded from a score of `threshold` on."""

    threshold: float
    is_together: bool = False

    def answer(self, world: World, case: Case, first: Exit) -> tuple[str, float, float]:
        """Return the answer, the seconds and the decoded tokens."""
        tokens = len(case.first.logprobs)
        if first.score < self.threshold:
            text, root_s, root_tokens = case.roots[GROWN]
            tree_s = max(case.ends_s.values())
            tree_s = max(tree_s, case.first_s) if self.is_together else tree_s + case.first_s
            tokens += root_tokens + sum(len(one.logprobs) for one in case.written.values())
            return read_answer(text), tree_s + root_s, tokens
        if self.is_together:
            tokens += sum(
                min(len(one.logprobs), world.count_tokens(name, case.first_s))
                for name, one in case.written.items()
            )
        return first.answer or "", case.first_s, tokens


def score_first(world: World, cases: Sequence[Case]) -> list[Exit]:
    """Return the scores of the first answers, and the answers."""
    exits = []
    for case in cases:
        gate = EarlyExit("first_answer").new_gate(["first"])
        text = world.tokenizer.decode(case.first.ids)
        gate.add_output("first", text, case.first.confidence, None)
        judged = gate.judge((), lambda: 1.0)
        assert judged is not None and judged.score is not None
        exits.append(Exit(judged.score.probability, case.first_s, ("first",), judged.answer))
    return exits


def compare_growth(world: World, learned: Sequence[Case], asked: Sequence[Case]) -> list[Row]:
    """Compare the large model, the tree, and trees that grow from the model's answer."""
    world.aggregate([(case, GROWN) for case in (*learned, *asked)])
    known = score_first(world, learned)
    new = score_first(world, asked)
    tree = []
    for case in asked:
        text, root_s, tokens = case.roots[MODELS]
        tokens += sum(len(one.logprobs) for one in case.written.values())
        tree.append((read_answer(text), max(case.ends_s.values()) + root_s, tokens))
    always = [read_answer(case.roots[GROWN][0]) for case in asked]
    unsure = choose_by_share([[first] for first in known], 0.8)
    growths = {"large alone": Growth(0.0)}
    for name, is_together in (("asked first", False), ("together", True)):
        growths[f"{name}, always grown"] = Growth(2.0, is_together)
        growths[f"{name}, one in five unsure: {unsure:.2f}"] = Growth(unsure, is_together)
        for percent in ALLOWED_PERCENT:
            limit = calibrate(learned, [[first] for first in known], percent, GROWN)
            label = f"{name}, {percent:g} in 100 may change: {limit:.2f}"
            growths[label] = Growth(limit, is_together)
    rows = [describe("tree", asked, tree, tree, always, 1.0)]
    for name, growth in growths.items():
        outcomes = [
            growth.answer(world, case, first) for case, first in zip(asked, new, strict=True)
        ]
        grown = sum(first.score < growth.threshold for first in new) / len(new)
        rows.append(describe(name, asked, outcomes, tree, always, grown))
    return rows


Outcomes = Sequence[tuple[str, float, float]]
"""Answers, with their seconds and tokens."""


def describe(
    name: str,
    cases: Sequence[Case],
    outcomes: Outcomes,
    tree: Outcomes,
    always: Sequence[str],
    grown: float,
) -> Row:
    """Compare outcomes with the tree's, and answers with those of trees that always grow."""
    percent = 100 / len(cases)
    truths = [case.answer.casefold() for case in cases]
    right, tree_right = (
        percent * sum(said == truth for (said, _, _), truth in zip(each, truths, strict=True))
        for each in (outcomes, tree)
    )
    changed = sum(said != other for (said, _, _), other in zip(outcomes, always, strict=True))
    return {
        "setting": name,
        "unsure %": f"{100 * grown:.1f}",
        "right %": f"{right:.1f}",
        "points": f"{right - tree_right:+.1f}",
        "changed %": f"{percent * changed:.1f}",
        "latency": f"{sum(row[1] for row in outcomes) / sum(row[1] for row in tree):.2f}",
        "tokens": f"{sum(row[2] for row in outcomes) / sum(row[2] for row in tree):.2f}",
    }


if __name__ == "__main__":
    main()
