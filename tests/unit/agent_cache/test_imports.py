import subprocess
import sys

WITHOUT_REDIS = "import sys; sys.modules['redis'] = None; sys.modules['redis.asyncio'] = None; "


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_memory_cache_needs_no_redis_py() -> None:
    assert python(WITHOUT_REDIS + "from agent_cache import MemoryAgentPromptCache").returncode == 0


def test_the_redis_cache_says_what_to_install() -> None:
    assert (
        "pip install 'shell-router[redis]'"
        in python(WITHOUT_REDIS + "import agent_cache.redis").stderr
    )


def test_the_cache_knows_nothing_of_the_router() -> None:
    code = (
        "import sys, agent_cache.redis; sys.exit(any(m.startswith('shell_router') for m in "
        "sys.modules))"
    )
    assert python(code).returncode == 0
