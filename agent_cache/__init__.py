"""The Agent Prompt Cache: what each agent has written so far, for readers that follow it
(Faster-MoA, 4.3).

`MemoryAgentPromptCache` serves one process; `agent_cache.redis.RedisAgentPromptCache` (which needs
redis-py) several.
"""

from agent_cache.memory import MemoryAgentPromptCache
from agent_cache.protocol import (
    AgentPromptCache,
    CacheError,
    CacheStats,
    CacheUnavailable,
    Chunk,
    End,
    JournalDiffers,
    Journals,
    JournalState,
    LogExists,
    LogKey,
    LogRead,
    LogTimeout,
    LogWriter,
)

__all__ = [
    "AgentPromptCache",
    "CacheError",
    "CacheStats",
    "CacheUnavailable",
    "Chunk",
    "End",
    "JournalDiffers",
    "JournalState",
    "Journals",
    "LogExists",
    "LogKey",
    "LogRead",
    "LogTimeout",
    "LogWriter",
    "MemoryAgentPromptCache",
]
