from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from training.family import Size, make_network, make_tokenizer, save
from transformers import BertConfig, BertModel, BertTokenizerFast

from shell_router.cli import main
from shell_router.core.predictors import Prospect
from shell_router.errors import ConfigError
from shell_router.prediction.files import Vectors
from shell_router.prediction.scores import (
    ENCODER,
    Graded,
    Head,
    ScoreModel,
    load_scores,
    save_scores,
)
from shell_router.prediction.teaching import (
    Lessons,
    TuningSettings,
    collect_lessons,
    fine_tune,
    fit_head,
    judge_router,
    train_router,
)

RNG = np.random.default_rng(0)
VECTORS: Vectors = RNG.normal(size=(400, 8)).astype(np.float32)
HARD = VECTORS[:, 0] > 0


def lessons() -> Lessons:
    """The large model answers everything rightly but some; the small one fails on what is hard."""
    right = np.stack([~HARD, RNG.random(400) < 0.9], axis=1).astype(float)
    return Lessons(tuple(f"question {n}" for n in range(400)), ("small", "large"), right)


def test_a_head_tells_who_will_be_right() -> None:
    taught = lessons()
    scores = fit_head(VECTORS[:300], taught.part(range(300))).scores(VECTORS[300:])
    judged = judge_router(scores, taught.part(range(300, 400)))
    assert judged.mean_precision > judged.chance_precision + 0.15
    assert scores[HARD[300:], 0].max() < scores[~HARD[300:], 0].min() + 0.5
    assert judged.oracle >= judged.chosen >= judged.alone["small"]


def test_a_model_that_is_always_right_has_a_high_score_everywhere() -> None:
    taught = Lessons(
        ("a", "b", "c"), ("small", "large"), np.array([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    )
    assert (fit_head(VECTORS[:3], taught).scores(VECTORS)[:, 0] > 0.7).all()


def test_answers_are_gathered_by_question_and_model() -> None:
    answers = [
        Graded(f"q{n}", model, right=n % 2 == 0) for n in range(30) for model in ("small", "large")
    ]
    found = collect_lessons(
        [*answers, Graded("q0", "small", right=False), Graded("new", "small", right=True)]
    )
    assert found.models == ("small", "large")
    assert found.right[0].tolist() == [0.5, 1.0]
    assert np.isnan(found.right[found.questions.index("new"), 1])


@pytest.mark.parametrize("option", [("--epochs", "5"), ("--learning-rate", "0")])
def test_options_of_fine_tuning_are_refused_without_it(
    option: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "train",
        "router",
        "graded.jsonl",
        "--data",
        "questions.jsonl",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*arguments, *option]) == 2
    assert "--epochs and --learning-rate go with --tune" in capsys.readouterr().err


def test_the_largest_held_out_share_leaves_a_question_to_learn_from(tmp_path: Path) -> None:
    few, encoder = separable().part(range(20)), tiny_encoder(tmp_path / "bert")
    assert train_router(few, tmp_path / "out", encoder=str(encoder), held_out=0.98).questions == 19


def test_answers_of_one_model_alone_teach_no_choice() -> None:
    with pytest.raises(ConfigError, match="1 models are too few"):
        collect_lessons([Graded(f"q{n}", "small", right=True) for n in range(30)])


def test_held_out_questions_are_not_learned_from() -> None:
    learned, held_out = lessons().split(0.25, seed=3)
    assert len(held_out.questions) == 100
    assert not set(learned.questions) & set(held_out.questions)


def test_known_models_that_were_asked_for_get_scores() -> None:
    head = Head(("small", "large"), np.array([[1.0, -1.0]]), np.zeros(2))
    model = ScoreModel(
        lambda texts: np.array([[len(text)] for text in texts], dtype=np.float32), head
    )
    asked = [
        Prospect("w", "1", text, 0, 0, 0, ("large", "huge"), scored=True)
        for text in ("", "long", "")
    ]
    scores = [answer["scores"] for answer in model.answers(asked)]
    assert [set(one) for one in scores] == [{"large"}] * 3
    assert scores[0]["large"] == scores[2]["large"] == pytest.approx(0.5)
    assert scores[1]["large"] < 0.1


def tiny_encoder(folder: Path) -> Path:
    """A BERT of random weights that knows its letters."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789?"
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=32).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def tiny_decoder(folder: Path) -> Path:
    """A decoder of random weights with the tiny models' tokenizer, which puts no token before a
    text.
    """
    size = Size(32, 1, heads=2, kv_heads=1, inner=64, learning_rate=0.0, solve_tokens=0)
    tokenizer = make_tokenizer()
    save(make_network(size, tokenizer, seed=0), tokenizer, folder)
    return folder


def separable() -> Lessons:
    """Whether a question ends with a question mark says who is right."""
    asks = [n % 2 == 0 for n in range(60)]
    questions = tuple(f"item {n}{'?' if asked else ''}" for n, asked in enumerate(asks))
    right = np.array([[1.0, 0.0] if asked else [0.0, 1.0] for asked in asks])
    return Lessons(questions, ("small", "large"), right)


@pytest.mark.slow
@pytest.mark.parametrize("made", [tiny_encoder, tiny_decoder])
def test_an_encoder_is_trained_with_its_head_and_its_folder_scores_alike(
    made: Callable[[Path], Path], tmp_path: Path
) -> None:
    encoder = made(tmp_path / "pretrained")
    tuning = TuningSettings(epochs=20, learning_rate=1e-2)
    judged = train_router(separable(), tmp_path / "out", encoder=str(encoder), tuning=tuning)
    assert judged.chosen > 0.9
    served = load_scores(tmp_path / "out", device="cpu", threads=1)
    scores = served.scores(["item 7?", "item 7"])
    assert scores[0, 0] > 0.5 > scores[0, 1]
    assert scores[1, 1] > 0.5 > scores[1, 0]


def test_a_frozen_folder_is_found_again_when_both_are_moved(tmp_path: Path) -> None:
    encoder = tiny_encoder(tmp_path / "bert")
    train_router(separable(), tmp_path / "out", encoder=str(encoder))
    before = load_scores(tmp_path / "out", device="cpu", threads=1).scores(["item 7?"])
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("bert", "out"):
        (tmp_path / name).rename(moved / name)
    assert load_scores(moved / "out", device="cpu", threads=1).scores(["item 7?"]) == pytest.approx(
        before
    )


def test_an_encoder_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_scores(tmp_path / "out", Head(("small",), np.zeros((1, 1)), np.zeros(1)), "../bert")
    with pytest.raises(ConfigError, match="bert is not there"):
        load_scores(tmp_path / "out", device="cpu", threads=1)


def test_fine_tuning_writes_weights_that_hold_no_code(tmp_path: Path) -> None:
    encoder = tiny_encoder(tmp_path / "bert")
    fine_tune(
        str(encoder),
        separable(),
        TuningSettings(epochs=1),
        tmp_path / ENCODER,
        device="cpu",
        threads=1,
    )
    assert {file.suffix for file in (tmp_path / ENCODER).iterdir()} <= {
        ".json",
        ".safetensors",
        ".txt",
    }
