"""The online path: walks the agent graph, grows prompts while precursors decode, and exits early."""

from shell_router.execution.executor import Executor
from shell_router.execution.programs import Programs
from shell_router.execution.requests import (
    AgentRequest,
    AgentUsage,
    Answer,
    MoaRequest,
    OutputOf,
    ProgramState,
    Segment,
)

__all__ = [
    "AgentRequest",
    "AgentUsage",
    "Answer",
    "Executor",
    "MoaRequest",
    "OutputOf",
    "ProgramState",
    "Programs",
    "Segment",
]
