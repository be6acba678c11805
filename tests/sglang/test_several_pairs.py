"""Two real pairs of one model: any of their servers work together, and one may die."""

from itertools import product
from pathlib import Path

import pytest

from launch.sglang_cpu.environment import built_environment
from launch.sglang_cpu.pair import CpuPair, cpu_pair
from shell_router.core.engine import Finish, Generation, Tokens
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair, random_rid

pytestmark = pytest.mark.sglang

PROMPT = [40 + at for at in range(60)]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def address(pair: CpuPair) -> PairAddress:
    return PairAddress(pair.prefill.url, pair.decode.url, pair.bootstrap_host, pair.bootstrap_port)


async def answer(pool: SglangPair, affinity: str) -> tuple[int, ...]:
    """The output's ids."""
    request = Generation(random_rid(), PROMPT, GREEDY, affinity=affinity)
    events = [event async for event in pool.generate(request)]
    assert isinstance(events[-1], Finish)
    return tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)


async def test_servers_of_two_pairs_work_together_and_outlive_a_dead_prefill(
    own_sglang: CpuPair, sglang_model: Path, tmp_path: Path
) -> None:
    venv = built_environment()
    assert venv is not None
    with cpu_pair(sglang_model, venv, tmp_path) as second:
        pool = SglangPair(address(own_sglang), address(second))
        assert await pool.probe() == ("route", "route")
        answers = {
            (affinity, turn): await answer(pool, affinity)  # the prefill server stays, the decode servers take turns
            for affinity, turn in product("ab", range(4))
        }
        assert len(set(answers.values())) == 1 and len(answers["a", 0]) == 8
        second.prefill.kill()
        for affinity in "abcdef":
            assert await answer(pool, affinity) == answers["a", 0]
        assert pool.retried >= 1
        await pool.aclose()
