"""Starts the engines that a deployment names, keeps them running, and stops them.

`plan` decides and does nothing; `running_engines` does it.
"""

from shell_router.launching.commands import EngineCommand
from shell_router.launching.plan import LaunchPlan, plan
from shell_router.launching.restarts import EngineRestarts
from shell_router.launching.supervisor import Engines, Patience, running_engines

__all__ = ["EngineCommand", "EngineRestarts", "Engines", "LaunchPlan", "Patience", "plan", "running_engines"]
