"""The committed models are as right as their card says."""

import json
import math
from pathlib import Path

import pytest
import torch
from training import family
from training.measuring import Measured, as_table, measured
from training.questions import read_problems
from transformers import AutoTokenizer, Qwen3ForCausalLM

from shell_router.engines.tokenizer import HfTokenizer

MODELS = Path(__file__).parents[2] / "models"
PLACES = {"sizes": MODELS, "specialists": MODELS / "specialists"}
CARDS: dict[str, dict[str, Measured]] = {
    name: json.loads((place / "measured.json").read_text(encoding="utf-8"))
    for name, place in PLACES.items()
}
TESTED = {
    "sizes": read_problems(MODELS / "data" / "test.jsonl"),
    "specialists": read_problems(MODELS / "data" / "specialists.jsonl"),
}
MEMBERS = [(name, member) for name, members in family.FAMILIES.items() for member in members]
ASKED = 400


@pytest.mark.parametrize("name", PLACES)
def test_the_card_shows_what_was_measured(name: str) -> None:
    assert as_table(CARDS[name]) in (MODELS / "README.md").read_text(encoding="utf-8")


def test_each_size_is_far_ahead_of_the_one_below() -> None:
    small, medium, large = (
        CARDS["sizes"][size]["accuracy"] for size in ("small", "medium", "large")
    )
    assert small + 0.1 < medium
    assert medium + 0.1 < large


def test_each_specialist_is_ahead_of_the_others_on_its_topic() -> None:
    for topic, card in CARDS["specialists"].items():
        others = [
            one["by_topic"][topic] for name, one in CARDS["specialists"].items() if name != topic
        ]
        assert card["by_topic"][topic] > max(others) + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_a_model_is_as_right_and_as_well_calibrated_as_its_card_says(
    name: str, member: str
) -> None:
    network = Qwen3ForCausalLM.from_pretrained(PLACES[name] / member, dtype=torch.float32)
    said, found = (
        CARDS[name][member],
        measured(network, family.make_tokenizer(), TESTED[name][:ASKED]),
    )
    assert found["parameters"] == said["parameters"]
    four_deviations = 4 * math.sqrt(said["accuracy"] * (1 - said["accuracy"]) / ASKED)
    assert abs(found["accuracy"] - said["accuracy"]) < four_deviations
    assert abs(found["auroc"] - said["auroc"]) < 0.1


@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_the_committed_tokenizer_is_the_one_that_training_makes(name: str, member: str) -> None:
    made, folder = json.loads(family.make_tokenizer().to_str()), PLACES[name] / member
    assert json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) == made
    ours, theirs = HfTokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": TESTED[name][0].question}]
    assert ours.encode(ours.render_chat(chat)) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


def test_no_question_is_in_two_files() -> None:
    files = [*TESTED.values(), read_problems(MODELS / "data" / "calibration.jsonl")]
    assert len({one.question for file in files for one in file}) == sum(map(len, files))
