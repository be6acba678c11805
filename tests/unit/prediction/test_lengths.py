import random
from pathlib import Path

import numpy as np
import orjson
import pytest

from shell_router.core.predictors import Prospect
from shell_router.errors import ConfigError, DataError
from shell_router.prediction.fitting import TracedRun, kendall_distance, read_traces, train_lengths
from shell_router.prediction.lengths import LengthModel


def line(program: str, agent: str, tokens: int, **fields: object) -> dict[str, object]:
    """A trace file's line, as the router writes it."""
    return {
        "program": program,
        "topology": "chain",
        "agent": agent,
        "stage": "1",
        "reads": [],
        "model": "small",
        "state": "finished",
        "system_tokens": 0,
        "user_tokens": 7,
        "known_tokens": 9,
        "prompt_tokens": 12,
        "output_tokens": tokens,
        "started_at": 1000.0,
        "started_s": 0.5,
        **fields,
    }


def write(file: Path, *lines: dict[str, object]) -> Path:
    file.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in lines))
    return file


def test_the_total_is_what_an_agent_and_all_that_follow_it_wrote(tmp_path: Path) -> None:
    file = write(
        tmp_path / "one.jsonl",
        line("p", "a", 10),
        line("p", "b", 20),
        line("p", "join", 5, reads=["a", "b"]),
        line("p", "root", 3, reads=["join", "a"]),
        line("q", "a", 99),
    )
    runs = {(run.program, run.own_tokens): run.total_tokens for run in read_traces([file])}
    assert runs == {("p", 10): 18, ("p", 20): 28, ("p", 5): 8, ("p", 3): 3, ("q", 99): 99}


def test_a_program_that_did_not_end_is_not_whole(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "one.jsonl", line("p", "a", 1), line("p", "b", 1, reads=["a"], state="failed")
    ).parent
    assert [run.whole for run in read_traces([folder])] == [False, False]


@pytest.mark.parametrize("wrong", [b"{", b"[]", b'{"program": "p"}'])
def test_a_wrong_line_is_named(tmp_path: Path, wrong: bytes) -> None:
    file = write(tmp_path / "one.jsonl", line("p", "a", 1))
    file.write_bytes(file.read_bytes() + wrong + b"\n")
    with pytest.raises(DataError, match=r"one\.jsonl:2: "):
        read_traces([file])


def runs(count: int, seed: int = 0) -> list[TracedRun]:
    """Programs whose questions name how much will be written; the large model writes twice as
    much."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        size, model = rng.randint(1, 5), rng.choice(["small", "large"])
        tokens = size * 20 * (1 + (model == "large")) + rng.randint(0, 5)
        text = f"please write {'many ' * size} lines"
        prospect = Prospect("w", "1", text, 0, size, rng.randint(1, 9), (model,), scored=False)
        made.append(
            TracedRun(
                str(number), prospect, model, tokens, 2 * tokens, 10, rng.random(), whole=True
            )
        )
    return made


def test_what_was_learned_orders_unseen_programs_better_than_arrival_and_input() -> None:
    _, scores = train_lengths(runs(600))
    for score in scores:
        assert score.forest < 0.1 < score.first_come
        assert score.forest < score.input_length


def test_a_saved_predictor_tells_the_same(tmp_path: Path) -> None:
    model, _ = train_lengths(runs(100))
    model.save(tmp_path / "lengths")
    asked = [
        Prospect(
            "w",
            "1",
            "please write many many lines",
            0,
            2,
            5,
            ("small", "large", "unknown"),
            scored=False,
        )
    ]
    predicted = LengthModel.load(tmp_path / "lengths").answers(asked)
    assert predicted == model.answers(asked)
    assert set(predicted[0]["own_tokens"]) == {"small", "large"}
    assert predicted[0]["total_tokens"]["large"] == pytest.approx(
        2 * predicted[0]["own_tokens"]["large"], rel=0.2
    )


def test_models_that_training_did_not_meet_get_no_prediction() -> None:
    model, _ = train_lengths(runs(100))
    assert model.answers([Prospect("w", "1", "", 0, 0, 0, ("unknown",), scored=False)]) == [{}]


def test_without_texts_the_counts_alone_are_learned() -> None:
    bare = [
        TracedRun(
            one.program,
            Prospect("w", "1", "", 0, one.prospect.user_tokens, 1, (one.model,), False),
            *rest,
        )
        for one in runs(100)
        for rest in [(one.model, one.own_tokens, one.total_tokens, 10, one.arrived_s, True)]
    ]
    model, scores = train_lengths(bare)
    assert model.features.sketch is None
    assert all(score.forest < 0.15 for score in scores)


def test_too_few_programs_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        train_lengths(runs(5))


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered"
)  # scikit-learn's share of one text's variance
def test_the_largest_held_out_share_leaves_a_program_to_learn_from() -> None:
    _, scores = train_lengths(runs(10), held_out=0.98)
    assert sum(score.runs for score in scores) > 0


def test_a_file_that_could_hold_code_is_refused(tmp_path: Path) -> None:
    model, _ = train_lengths(runs(50))
    model.save(tmp_path)
    np.savez(tmp_path / "lengths.npz", **{"own.roots": np.array([{}], dtype=object)})
    with pytest.raises(ConfigError, match=r"lengths\.npz cannot be read"):
        LengthModel.load(tmp_path)


def test_a_folder_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text('{"form": "something else"}')
    with pytest.raises(ConfigError, match="not of the form"):
        LengthModel.load(tmp_path)


@pytest.mark.parametrize(
    ("predicted", "distance"),
    [([1, 2, 3], 0.0), ([3, 2, 1], 1.0), ([5, 5, 5], 0.5), ([1, 3, 2], 1 / 3)],
)
def test_the_distance_counts_pairs_in_the_wrong_order(
    predicted: list[float], distance: float
) -> None:
    assert kendall_distance(predicted, [1, 2, 3]) == pytest.approx(distance)


def test_pairs_that_are_equal_in_truth_do_not_count() -> None:
    assert kendall_distance([1, 2, 3], [7, 7, 8]) == 0.0
