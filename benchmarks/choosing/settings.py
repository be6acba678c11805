"""What is compared: fleets, data sets with the paper's figures, and policies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from choosing.predicting import Blur
from choosing.tasks import APPS, MATH, Ability
from choosing.world import Policy
from shell_router.scheduling.model_choice import ModelChoiceSettings

FLEETS = {
    "Qwen1.5+7B": ("qwen2.5-1.5b", "qwen2.5-7b"),
    "Qwen1.5+14B": ("qwen2.5-1.5b", "qwen2.5-14b"),
    "Qwen1.5+3+14B": ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-14b"),
}
COUNTED = Blur(scores=None, flat=True)
SLACKS = (0.0, 1.0, 2.0, 4.0)
WORTHS = (10.0, 40.0, 160.0)


@dataclass(frozen=True, slots=True)
class DataSet:
    """Its tasks, predictors as good as the paper's and as slow as this router's on a busy CPU, and its figures.

    `paper` has Chimera over vLLM by fleet (section 4.3): speed-up, and points of score. `distance` has Kendall's by
    model (table 3), `precision` is the macro average precision (table 2).
    """

    abilities: Mapping[str, Ability]
    blur: Blur
    paper: Mapping[str, str]
    distance: Mapping[str, float]
    precision: float


DATA = {
    "MATH": DataSet(
        MATH,
        Blur(scores=2.0, lengths=0.6, cost_s=0.02),
        {"Qwen1.5+7B": "2.5x, +2.2", "Qwen1.5+14B": "2.1x, +5.0", "Qwen1.5+3+14B": "2.1x, +1.6"},
        {"qwen2.5-1.5b": 0.146, "qwen2.5-3b": 0.195, "qwen2.5-7b": 0.185, "qwen2.5-14b": 0.222},
        0.740,
    ),
    "APPS": DataSet(
        APPS,
        Blur(scores=2.0, lengths=0.55, cost_s=0.02),
        {"Qwen1.5+7B": "3.4x, +16.0", "Qwen1.5+14B": "2.9x, +10.5", "Qwen1.5+3+14B": "2.7x, +8.2"},
        {"qwen2.5-1.5b": 0.207, "qwen2.5-3b": 0.139, "qwen2.5-7b": 0.124, "qwen2.5-14b": 0.129},
        0.521,
    ),
}


def policies(predicted: Blur) -> Mapping[str, Policy]:
    """By name, with predictors that are off by so much."""
    chimera = {s: ModelChoiceSettings("chimera", s) for s in SLACKS}
    worth = {s: ModelChoiceSettings("worth", answer_worth_s=s) for s in WORTHS}
    fewest = ModelChoiceSettings("least_loaded")
    return {
        "vLLM": Policy(fewest, "fcfs", COUNTED),
        "MLFQ": Policy(fewest, "least_attained", COUNTED, by_program=True),
        "LTR": Policy(fewest, "shortest_total", replace(predicted, scores=None, whole=False)),
        "vLLM (STJF)": Policy(fewest, "shortest_total", Blur(scores=None)),
        **{f"Chimera, slack {s:g}": Policy(choice, "shortest_total", predicted) for s, choice in chimera.items()},
        **{f"worth, {s:g} s": Policy(choice, "shortest_total", predicted) for s, choice in worth.items()},
        "best score": Policy(ModelChoiceSettings("best_score"), "shortest_total", predicted),
    }


def oracles(predicted: Blur) -> Mapping[str, Policy]:
    """Chimera, with true lengths, true outcomes, and both."""
    blurs = {
        "Chimera, slack 1": predicted,
        "oracle lengths": replace(predicted, lengths=0.0),
        "oracle router": replace(predicted, oracle_scores=True),
        "oracle both": replace(predicted, lengths=0.0, oracle_scores=True),
    }
    return {name: Policy(ModelChoiceSettings("chimera"), "shortest_total", blur) for name, blur in blurs.items()}
