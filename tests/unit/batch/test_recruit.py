import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shell_router.batch.pool import Pool, PoolModel, PoolWorker, Recruiting
from shell_router.batch.pool_run import recruit
from shell_router.batch.prompts import Proposal, Result, as_lines
from shell_router.batch.questions import Question
from shell_router.batch.recruit import (
    NEIGHBORS,
    compare_skills,
    compare_texts,
    draw_proposers,
    weigh_scores,
)
from shell_router.config import EmbedderSettings
from shell_router.errors import ConfigError
from shell_router.standins.embedded.settings import EmbeddedSection

SCORES = {"a": 0.9, "b": 0.0, "c": 0.3, "d": 0.3}


def shares(scores: dict[str, float], number: int, draws: int = 4000) -> dict[str, float]:
    """How often each proposer is drawn."""
    drawn = Counter(
        name
        for seed in range(draws)
        for name in draw_proposers(scores, number, random.Random(seed))
    )
    return {name: drawn[name] / draws for name in scores}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_that_number_of_different_models_is_drawn_in_their_order(number: int) -> None:
    for seed in range(50):
        drawn = draw_proposers(SCORES, number, random.Random(seed))
        assert len(set(drawn)) == number
        assert list(drawn) == sorted(drawn)


def test_the_same_seed_draws_the_same_and_another_another() -> None:
    assert draw_proposers(SCORES, 2, random.Random(1)) == draw_proposers(
        SCORES, 2, random.Random(1)
    )
    assert len({draw_proposers(SCORES, 2, random.Random(seed)) for seed in range(50)}) > 2


def test_experts_are_drawn_by_their_scores_and_one_that_was_never_right_sometimes() -> None:
    found = shares(SCORES, 1)
    assert found["a"] == pytest.approx(0.9 / 1.51, abs=0.03)
    assert found["c"] == pytest.approx(0.3 / 1.51, abs=0.03)
    assert 0 < found["b"] < 0.03
    assert all(
        share == pytest.approx(0.5, abs=0.03)
        for share in shares(dict.fromkeys("abcd", 0.0), 2).values()
    )


def test_skills_are_alike_as_far_as_they_are_shared() -> None:
    asked = [frozenset("xy"), frozenset("z"), frozenset[str]()]
    known = [frozenset("xy"), frozenset("yz"), frozenset[str]()]
    assert compare_skills(asked, known).tolist() == [
        [1, pytest.approx(1 / 3), 0],
        [0, 0.5, 0],
        [0, 0, 0],
    ]


def test_texts_are_alike_by_the_cosine_of_their_embeddings_and_never_less_than_not_at_all() -> None:
    asked, known = (
        np.array([[2.0, 0.0], [0.0, 0.0]]),
        np.array([[1.0, 0.0], [3.0, 3.0], [-1.0, 0.0]]),
    )
    assert compare_texts(asked, known)[0].tolist() == [1, pytest.approx(2**-0.5), 0]
    assert compare_texts(asked, known)[1].tolist() == [0, 0, 0]


def test_only_the_nearest_neighbours_count() -> None:
    angles = np.linspace(0, 1.5, 3 * NEIGHBORS)
    known = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    similarity = compare_texts(np.array([[1.0, 0.0]]), known)
    assert (similarity[0, :NEIGHBORS] > 0).all()
    assert not similarity[0, NEIGHBORS:].any()


def test_an_expert_scores_by_how_right_it_was_about_what_is_alike() -> None:
    known = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    similarity = np.array([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert weigh_scores(similarity, known).tolist() == [
        [0.75, 0.25],
        [pytest.approx(1 / 3), pytest.approx(2 / 3)],
    ]


def pool(skills: Path | None = None, proposers: int = 1, model: str = "hash") -> Pool:
    models = {name: PoolModel(Path(name)) for name in ("sums", "words")}
    workers = (PoolWorker(embedded=EmbeddedSection()),)
    return Pool(
        models, workers, recruit=Recruiting(proposers, skills), embedder=EmbedderSettings(model)
    )


def opinion(model: str, right: bool | None) -> Proposal:
    return Proposal(model, "1", 0.5, 3, right)


def known_run(folder: Path, *, skills: bool = True, right: bool | None = True) -> Path:
    """A run in which `sums` was right about numbers, and `words` about the others."""
    results = []
    for line in range(40):
        sums = line % 2 == 0
        wrong = None if right is None else not right
        results.append(
            Result(
                line + 1,
                str(line),
                "add the numbers seven and nine" if sums else "which animal barks loudest",
                ("numbers",) if skills and sums else ("animals",) if skills else (),
                proposals=(
                    opinion("sums", right if sums else wrong),
                    opinion("words", wrong if sums else right),
                ),
            )
        )
    (folder / "results.jsonl").write_bytes(as_lines(results))
    return folder


def asked(skills: bool = True) -> list[Question]:
    """As many questions about numbers as about animals."""
    about = {
        0: ("add the numbers two and four", "numbers"),
        1: ("which animal barks at night", "animals"),
    }
    return [
        Question(str(n), about[n % 2][0], skills=frozenset({about[n % 2][1]} if skills else ()))
        for n in range(60)
    ]


def fitting(drawn: Mapping[str, tuple[str, ...]]) -> float:
    """How often the proposer was drawn that knows its subject."""
    return sum(names == (("sums", "words")[int(name) % 2],) for name, names in drawn.items()) / len(
        drawn
    )


async def test_without_a_known_run_all_experts_are_drawn_alike() -> None:
    drawn = await recruit(pool(), asked(), 0)
    assert Counter(drawn.values()).keys() == {("sums",), ("words",)}
    assert 0.3 < fitting(drawn) < 0.7


@pytest.mark.parametrize(
    ("of_asked", "of_known"), [(True, True), (False, True), (True, False), (False, False)]
)
async def test_experts_are_drawn_by_skills_or_where_none_are_named_by_texts(
    tmp_path: Path, of_asked: bool, of_known: bool
) -> None:
    drawn = await recruit(pool(known_run(tmp_path, skills=of_known)), asked(of_asked), 0)
    assert fitting(drawn) > 0.75


async def test_skills_alone_need_no_embedder_and_texts_do(tmp_path: Path) -> None:
    known_run(tmp_path)
    assert fitting(await recruit(pool(tmp_path, model="none"), asked(), 0)) > 0.9
    with pytest.raises(
        ConfigError, match=r"embedder\.model is none, and not all questions name skills"
    ):
        await recruit(pool(tmp_path, model="none"), asked(skills=False), 0)


async def test_a_question_keeps_the_experts_of_its_line_and_the_others_do_not_change_by_it(
    tmp_path: Path,
) -> None:
    questions = asked()
    drawn = await recruit(pool(), questions, 3)
    named = [replace(questions[0], proposers=("words", "sums")), *questions[1:]]
    assert await recruit(pool(), named, 3) == {**drawn, "0": ("words", "sums")}
    assert await recruit(pool(), questions, 4) != drawn


async def test_where_all_answer_no_run_is_read(tmp_path: Path) -> None:
    drawn = await recruit(pool(tmp_path / "absent", proposers=5), asked(), 0)
    assert set(drawn.values()) == {("sums", "words")}


async def test_a_run_whose_right_answers_are_not_known_tells_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"recruit\.skills: in that run no question with a known answer was answered",
    ):
        await recruit(pool(known_run(tmp_path, right=None)), asked(), 0)
