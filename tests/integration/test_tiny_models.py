"""The committed models are as right as their card says."""

import json
import math
from pathlib import Path

import pytest
import torch
from training import family
from training.measuring import Measured, as_table, measured
from training.problems import Problem
from transformers import AutoTokenizer, Qwen3ForCausalLM

from shell_router.engines.tokenizer import HfTokenizer

MODELS = Path(__file__).parents[2] / "models"
CARD: dict[str, Measured] = json.loads((MODELS / "measured.json").read_text(encoding="utf-8"))
TESTED = [Problem(**json.loads(line)) for line in (MODELS / "data" / "test.jsonl").read_text().splitlines()]
ASKED = 400


def test_the_card_shows_what_was_measured_and_each_size_is_far_ahead_of_the_one_below() -> None:
    assert as_table(CARD) in (MODELS / "README.md").read_text(encoding="utf-8")
    small, medium, large = (CARD[size]["accuracy"] for size in ("small", "medium", "large"))
    assert small + 0.1 < medium
    assert medium + 0.1 < large


@pytest.mark.slow
@pytest.mark.parametrize("size", family.SIZES)
def test_a_model_is_as_right_and_as_well_calibrated_as_its_card_says(size: str) -> None:
    network = Qwen3ForCausalLM.from_pretrained(MODELS / size, dtype=torch.float32)
    said, found = CARD[size], measured(network, family.make_tokenizer(), TESTED[:ASKED])
    assert found["parameters"] == said["parameters"]
    four_deviations = 4 * math.sqrt(said["accuracy"] * (1 - said["accuracy"]) / ASKED)
    assert abs(found["accuracy"] - said["accuracy"]) < four_deviations
    assert abs(found["auroc"] - said["auroc"]) < 0.1


@pytest.mark.parametrize("size", family.SIZES)
def test_the_committed_tokenizer_is_the_one_that_training_makes(size: str) -> None:
    made = json.loads(family.make_tokenizer().to_str())
    assert json.loads((MODELS / size / "tokenizer.json").read_text(encoding="utf-8")) == made
    ours, theirs = HfTokenizer.from_folder(MODELS / size), AutoTokenizer.from_pretrained(MODELS / size)
    chat = [{"role": "user", "content": TESTED[0].question}]
    assert ours.encode(ours.render_chat(chat)) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


def test_no_question_is_in_both_files() -> None:
    calibration = (MODELS / "data" / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    assert not {one.question for one in TESTED} & {json.loads(line)["question"] for line in calibration}
