"""The Agent Prompt Cache: each agent's output, readable while it is written (Faster-MoA, 4.3).

`MemoryAgentPromptCache` serves one process. `agent_cache.redis.RedisAgentPromptCache` serves
several and needs redis-py.
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
    JournalTaken,
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
    "JournalTaken",
    "Journals",
    "LogExists",
    "LogKey",
    "LogRead",
    "LogTimeout",
    "LogWriter",
    "MemoryAgentPromptCache",
]
