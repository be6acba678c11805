"""The evaluation: how right, how fast and at what cost a router's models, votes and topologies answer."""

from shell_router.evaluation.calibrate import run_calibration
from shell_router.evaluation.options import EvaluationOptions
from shell_router.evaluation.run import run_evaluation

__all__ = ["EvaluationOptions", "run_calibration", "run_evaluation"]
