"""The stages of training, each for one size, in a process of its own. What is done already is not
done again.
"""

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from training import family
from training.drafts import Drafted, draw_drafts, read_drafts, write_drafts
from training.family import SIZES, SPECIALISTS
from training.lessons import Example, Lessons
from training.measuring import Measured, measured
from training.practice import Course, practise
from training.problems import TOPICS, Problem, Topic, drill, problems
from training.questions import held_out, read_problems
from training.sampling import write

PROPOSER = {"temperature": 0.7, "top_p": 0.95}
"""How proposers sample, in training as in the topologies."""
DRAFTED = 6000
DRAFTS_EACH = 3
MEMBERS = {**SIZES, **SPECIALISTS}
OWN_SHARE = 36
"""Problems of its own topic that a specialist learns for each one of all topics: 95 % are its own.
From the others it learns that it does not know them, which makes its confidence tell."""


def solve(size: str, work: Path) -> None:
    """Learn to solve problems, from random weights."""
    lessons = Lessons(family.make_tokenizer())
    network = family.make_network(MEMBERS[size], family.make_tokenizer(), seed=0)
    course = Course(MEMBERS[size].solve_tokens, MEMBERS[size].learning_rate)
    _learn(size, "solve", network, partial(_solving, lessons, size), course, work)


def _solving(lessons: Lessons, size: str, share: int) -> list[Example]:
    rng = random.Random(f"solve/{size}/{share}")
    return _alone(lessons, rng, MEMBERS[size].topic, stories=4500, drills=3500)


def _alone(
    lessons: Lessons, rng: random.Random, topic: Topic | None, *, stories: int, drills: int
) -> list[Example]:
    """Problems without drafts, and drills of eight equations."""
    asked = [(one.question, one.solution) for one in _stories(rng, stories, topic)]
    asked += [drill(rng, 8, topic) for _ in range(drills)]
    return [lessons.example(lessons.question(question), said) for question, said in asked]


def sample(size: str, work: Path) -> None:
    """Write what proposers of this size say to fresh problems, if it will learn to combine."""
    file = work / f"drafts-{size}.jsonl"
    if file.exists() or not MEMBERS[size].combine_tokens:
        return
    lessons = Lessons(family.make_tokenizer())
    network = _loaded(size, "solve", work)
    prompts = [lessons.question(one.question) for one in _drafted() for _ in range(DRAFTS_EACH)]
    written = [output.ids for output in write(network, prompts, **PROPOSER, seed=1)]
    write_drafts(
        file, [written[at : at + DRAFTS_EACH] for at in range(0, len(written), DRAFTS_EACH)]
    )


def _drafted() -> Sequence[Problem]:
    return _stories(random.Random("drafted"), DRAFTED)


def _stories(rng: random.Random, number: int, topic: Topic | None = None) -> list[Problem]:
    """Problems, most of them of `topic` where there is one, less those that are kept for
    testing."""
    kept = held_out()
    topics = [*[topic] * OWN_SHARE, *TOPICS] if topic else []
    return [one for one in islice(problems(rng, topics=topics), number) if one.question not in kept]


def combine(size: str, work: Path) -> None:
    """Learn to combine the drafts of all sizes into an answer, and go on solving; a specialist does
    not.
    """
    if not MEMBERS[size].combine_tokens:
        return
    lessons = Lessons(family.make_tokenizer())
    by_size = [read_drafts(work / f"drafts-{one}.jsonl") for one in SIZES]
    drafted = [
        Drafted(problem, dict(zip(SIZES, drafts, strict=True)))
        for problem, *drafts in zip(_drafted(), *by_size, strict=True)
    ]
    network = _loaded(size, "solve", work)
    course = Course(SIZES[size].combine_tokens, SIZES[size].learning_rate / 4)
    _learn(size, "combine", network, partial(_combining, lessons, size, drafted), course, work)


def _combining(
    lessons: Lessons, size: str, drafted: Sequence[Drafted], share: int
) -> list[Example]:
    """A thousand problems with drafts, and as many without, and drills: without them the arithmetic
    is forgotten.
    """
    rng = random.Random(f"combine/{size}/{share}")
    chosen = [drafted[rng.randrange(len(drafted))] for _ in range(1000)]
    read = [
        lessons.example(
            lessons.drafts(one.problem.question, draw_drafts(rng, one)), one.problem.solution
        )
        for one in chosen
    ]
    return read + _alone(lessons, rng, None, stories=1000, drills=800)


def publish(size: str, work: Path, out: Path) -> None:
    """Write the model's folder."""
    last = "combine" if MEMBERS[size].combine_tokens else "solve"
    family.save(_loaded(size, last, work), family.make_tokenizer(), out / size)


def measure(size: str, out: Path, test: Path) -> Measured:
    """How a written model does on the test set, decoding greedily."""
    torch.set_num_threads(1)
    network = Qwen3ForCausalLM.from_pretrained(out / size, dtype=torch.float32)
    tokenizer = family.make_tokenizer()
    return measured(network, tokenizer, read_problems(test))


def _learn(
    size: str,
    stage: str,
    network: Qwen3ForCausalLM,
    more: Callable[[int], Sequence[Example]],
    course: Course,
    work: Path,
) -> None:
    torch.set_num_threads(1)
    # PyTorch's fused attention is many times slower than plain products in a backward pass on CPUs
    # (2.13)
    network.set_attn_implementation("eager")

    def tell(progress: str) -> None:
        print(f"{stage:8} {size:6} {progress}", file=sys.stderr, flush=True)

    practise(network, more, course, work / f"{stage}-{size}.pt", tell)


def _loaded(size: str, stage: str, work: Path) -> Qwen3ForCausalLM:
    torch.set_num_threads(1)
    network = family.make_network(MEMBERS[size], family.make_tokenizer(), seed=0)
    network.load_state_dict(torch.load(work / f"{stage}-{size}.pt")["network"])
    return network
