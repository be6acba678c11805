"""The online path: walks the agent graph, grows prompts while precursors decode, and exits early."""

from shell_router.execution.agent_planning import AGENT_REQUEST
from shell_router.execution.choosing import Auto, ModelChooser, ModelFigures
from shell_router.execution.classifying import Classes
from shell_router.execution.deciding import Judges
from shell_router.execution.executor import Executor
from shell_router.execution.planning import stages_of, workflow_of
from shell_router.execution.programs import Programs
from shell_router.execution.prospects import KnownPrompt, known_of_agent, known_of_request
from shell_router.execution.requests import (
    AgentRequest,
    AgentUsage,
    Answer,
    MoaRequest,
    OutputOf,
    ProgramState,
    Segment,
)
from shell_router.execution.scoring import Scores
from shell_router.execution.step_executor import StepExecutor

__all__ = [
    "AGENT_REQUEST",
    "AgentRequest",
    "AgentUsage",
    "Answer",
    "Auto",
    "Classes",
    "Executor",
    "Judges",
    "KnownPrompt",
    "MoaRequest",
    "ModelChooser",
    "ModelFigures",
    "OutputOf",
    "ProgramState",
    "Programs",
    "Scores",
    "Segment",
    "StepExecutor",
    "known_of_agent",
    "known_of_request",
    "stages_of",
    "workflow_of",
]
