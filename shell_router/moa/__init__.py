"""The online path: walks the agent graph, grows prompts while precursors decode, and exits early."""

from shell_router.moa.calls import ToolCall, ToolOffer
from shell_router.moa.choosing import Auto, ModelChooser, ModelFigures
from shell_router.moa.executor import Executor
from shell_router.moa.journal import Journal
from shell_router.moa.planning import (
    AGENT_REQUEST,
    KnownPrompt,
    known_of_agent,
    known_of_request,
    stages_of,
    workflow_of,
)
from shell_router.moa.programs import Programs
from shell_router.moa.requests import (
    AgentRequest,
    AgentUsage,
    Answer,
    Deadline,
    MoaRequest,
    OutputOf,
    ProgramState,
    Segment,
)
from shell_router.moa.steps import StepExecutor

__all__ = [
    "AGENT_REQUEST",
    "AgentRequest",
    "AgentUsage",
    "Answer",
    "Auto",
    "Deadline",
    "Executor",
    "Journal",
    "KnownPrompt",
    "MoaRequest",
    "ModelChooser",
    "ModelFigures",
    "OutputOf",
    "ProgramState",
    "Programs",
    "Segment",
    "StepExecutor",
    "ToolCall",
    "ToolOffer",
    "known_of_agent",
    "known_of_request",
    "stages_of",
    "workflow_of",
]
