"""The Agent Prompt Cache that several processes share through Redis (6.2 or newer, or Valkey)."""

try:
    import redis.asyncio  # noqa: F401 (asked for here so that its absence is explained once)
except ImportError as error:
    raise ImportError(
        "agent_cache.redis needs redis-py, which is not installed. Run: pip install "
        "'shell-router[redis]'"
    ) from error

from agent_cache.redis.cache import RedisAgentPromptCache

__all__ = ["RedisAgentPromptCache"]
