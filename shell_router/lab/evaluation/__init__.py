"""The evaluation: how right, how fast and at what cost a router's models, votes and topologies answer."""

from shell_router.lab.evaluation.calibration import Tried, run_calibration
from shell_router.lab.evaluation.records import EvaluationOptions
from shell_router.lab.evaluation.run import run_evaluation

__all__ = ["EvaluationOptions", "Tried", "run_calibration", "run_evaluation"]
