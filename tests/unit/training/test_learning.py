"""The training script's parts on networks and courses small enough to run in seconds."""

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from training import family, stages
from training.drafts import Drafted, draw_drafts, read_drafts, write_drafts
from training.family import Size
from training.lessons import Example, Lessons
from training.measuring import auroc
from training.practice import Course, practise
from training.problems import TOPICS, make_problem, problems
from training.sampling import write

from benchmarks.random_checkpoint import TURN_END
from shell_router.core.engine import ServedModel
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.prompt import GrowingPrompt, render_agent_prompt
from shell_router.topology import Agent, Prompt
from shell_router.topology.prompting import AGGREGATOR
from tests.fakes.scripted_engine import Script, ScriptedEngine

TOKENIZER = family.make_tokenizer()
LESSONS = Lessons(TOKENIZER)
TINY = Size(
    32, 1, heads=2, kv_heads=1, inner=64, learning_rate=1e-2, solve_tokens=0, combine_tokens=0
)
PROBLEM = make_problem(random.Random(3), 3, "number")


def examples(share: int) -> list[Example]:
    asked = islice(problems(random.Random(share)), 40)
    return [LESSONS.example(LESSONS.question(one.question), one.solution) for one in asked]


def ignore(_progress: str) -> None:
    pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("tiny")
    family.save(family.make_network(TINY, TOKENIZER, seed=0), TOKENIZER, folder)
    tokenizer = HfTokenizer.from_folder(folder)
    return ServedModel(
        "tiny", ScriptedEngine(tokenizer, lambda _request: Script("")), tokenizer, 4096
    )


def test_models_are_taught_on_the_very_prompts_that_the_router_makes(served: ServedModel) -> None:
    drafts = ["2+2=4. Answer: 4", "2+3=5. Answer: A"]
    ids = [TOKENIZER.encode(draft).ids for draft in drafts]
    aggregator = Agent("root", "tiny", ("a", "b"), AGGREGATOR)
    chat = [{"role": "user", "content": PROBLEM.question}]
    prompt, outputs = GrowingPrompt(served.tokenizer), iter(ids)
    for part in render_agent_prompt(aggregator, ("a", "b"), served, chat).parts:
        if isinstance(part, str):
            prompt.add_text(part)
        else:
            prompt.add_text(part.before)
            prompt.add_ids(next(outputs))
            prompt.add_text(part.after)
    assert LESSONS.drafts(PROBLEM.question, ids) == prompt.encode_all()
    (asked,) = render_agent_prompt(Agent("a", "tiny", (), Prompt()), (), served, chat).parts
    assert isinstance(asked, str)
    assert LESSONS.question(PROBLEM.question) == served.tokenizer.encode(asked)


def test_digits_are_tokens_of_their_own_and_words_are_few() -> None:
    assert TOKENIZER.encode("24+13=37. Answer: 37").tokens == [
        *"24+13=37.",
        "ĠAnswer",
        ":",
        "Ġ",
        "3",
        "7",
    ]
    assert TOKENIZER.decode(TOKENIZER.encode(PROBLEM.question).ids) == PROBLEM.question
    assert len(TOKENIZER.encode(AGGREGATOR.prefix).ids) < 1.4 * len(AGGREGATOR.prefix.split())


def test_what_is_learned_ends_the_turn() -> None:
    example = LESSONS.example([1], "Answer: 4")
    assert example.target[-1] == TOKENIZER.token_to_id(TURN_END)


def test_a_course_that_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, cut = (family.make_network(TINY, TOKENIZER, seed=0) for _ in range(2))
    course = Course(tokens=12_000, learning_rate=1e-2)
    practise(whole, examples, course, tmp_path / "whole.pt", ignore)

    def until_the_third(share: int) -> list[Example]:
        if share == 2:
            raise InterruptedError
        return examples(share)

    with pytest.raises(InterruptedError):
        practise(cut, until_the_third, course, tmp_path / "cut.pt", ignore)
    resumed = family.make_network(TINY, TOKENIZER, seed=1)
    practise(resumed, examples, course, tmp_path / "cut.pt", ignore)
    for name, weights in whole.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name]), name


def test_a_specialist_learns_its_topic_and_meets_few_of_the_others() -> None:
    met = Counter(one.topic for one in stages._stories(random.Random(5), 2000, "groups"))
    assert 0.93 < met["groups"] / met.total() < 0.97
    assert set(met) == set(TOPICS)
    assert {one.topic for one in stages._stories(random.Random(5), 50)} == {None}


def test_practice_lowers_the_loss(tmp_path: Path) -> None:
    losses: list[float] = []
    network = family.make_network(TINY, TOKENIZER, seed=0)
    course = Course(tokens=12_000, learning_rate=1e-2)
    practise(
        network,
        examples,
        course,
        tmp_path / "x.pt",
        lambda line: losses.append(float(line.split()[2])),
    )
    assert losses[-1] < losses[0] - 1


def test_outputs_do_not_depend_on_what_else_is_in_the_batch() -> None:
    network = family.make_network(TINY, TOKENIZER, seed=0).double()
    prompts = [LESSONS.question(one.question) for one in islice(problems(random.Random(2)), 6)]
    together = write(network, prompts, temperature=0)
    alone = [write(network, [prompt], temperature=0)[0] for prompt in prompts]
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert all(0 < one.confidence <= 1 for one in together)


def test_a_draft_is_drawn_from_every_size_and_some_may_be_missing() -> None:
    drafted = Drafted(
        PROBLEM,
        {size: [[number, draft] for draft in range(3)] for number, size in enumerate("sml")},
    )
    drawn = [draw_drafts(random.Random(seed), drafted) for seed in range(3000)]
    assert {len(one) for one in drawn} == set(range(1, 10))
    whole = [one for one in drawn if len(one) == 9]
    assert all(len({tuple(draft) for draft in one}) == 9 for one in whole)


def test_drafts_are_read_as_they_were_written(tmp_path: Path) -> None:
    drafts = [[[1, 2], []], [[3], [4, 5]]]
    write_drafts(tmp_path / "drafts.jsonl", drafts)
    assert read_drafts(tmp_path / "drafts.jsonl") == drafts


def test_auroc_is_the_chance_that_a_right_answer_is_the_surer_one() -> None:
    assert auroc([0.9, 0.8, 0.4, 0.3], [True, True, False, False]) == 1.0
    assert auroc([0.9, 0.2, 0.4], [True, True, False]) == 0.5
    assert auroc([0.5, 0.5], [True, False]) == 0.5
    assert auroc([0.5, 0.9], [True, True]) == 0.5
