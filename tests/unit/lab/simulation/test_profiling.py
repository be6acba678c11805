"""A simulated pair is profiled in virtual time: its costs are known, and nothing else takes any."""

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from shell_router.core.engine import Engine, Finish, Generation, Prefilled, Tokens
from shell_router.errors import ConfigError
from shell_router.lab.simulation.profiling import (
    Amount,
    ProfiledCosts,
    build_decode_timing,
    find_joint_steps,
    profile_engine,
)
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    PairCosts,
    PrefillCosts,
    TransferCosts,
)
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.text import Written

TRUE = PairCosts(
    PrefillCosts(0.002, 2e-5, 4e-8, chunk_tokens=512, prompts=1, cache_tokens=65_536),
    DecodeCosts(0.001, 5e-5, 2e-7, cache_tokens=65_536, max_batch_size=32),
    TransferCosts(0.0015, 5e-6),
)
LIMITS = PairCosts(
    PrefillCosts(0.0, 0.0, chunk_tokens=512, prompts=1, cache_tokens=65_536),
    DecodeCosts(0.0, cache_tokens=65_536, max_batch_size=32),
)
VOCABULARY = 150_000
SHORT = Amount((32, 64, 128), (1, 2, 4), new_tokens=8, rounds=1)


@dataclass(slots=True)
class Overheard:
    """An engine whose requests are kept."""

    engine: Engine
    prefilled: list[Generation] = field(default_factory=list)
    generated: list[Generation] = field(default_factory=list)

    async def prefill(self, request: Generation) -> Prefilled:
        self.prefilled.append(request)
        return await self.engine.prefill(request)

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        self.generated.append(request)
        return self.engine.generate(request)


def endless(_request: Generation) -> Written:
    return Written(("x",) * 1000, (1,) * 1000, -0.1)


def profile(amount: Amount) -> tuple[ProfiledCosts, Overheard]:
    async def run() -> tuple[ProfiledCosts, Overheard]:
        engine = Overheard(SimulatedPair(TRUE, endless))
        clock = asyncio.get_running_loop().time
        draws = random.Random(1)
        return await profile_engine(
            engine, amount, LIMITS, vocabulary=VOCABULARY, draws=draws, clock=clock
        ), engine

    return run_virtual(run())


def test_the_costs_of_a_simulated_pair_are_found_again() -> None:
    found, _ = profile(Amount(rounds=2))
    costs = found.costs
    assert costs.prefill.forward_s == pytest.approx(0.002, rel=1e-3)
    assert costs.prefill.token_s == pytest.approx(2e-5, rel=1e-3)
    assert costs.prefill.attention_s == pytest.approx(4e-8, rel=1e-3)
    assert costs.decode.step_s == pytest.approx(0.001, rel=1e-3)
    assert costs.decode.sequence_s == pytest.approx(5e-5, rel=1e-3)
    assert costs.decode.context_s == pytest.approx(2e-7, rel=1e-3)
    assert costs.transfer.request_s == pytest.approx(0.0015, rel=1e-3)
    assert costs.transfer.token_s == pytest.approx(5e-6, rel=1e-3)
    assert found.errors == pytest.approx({"prefill": 0, "first token": 0, "decode": 0}, abs=1e-3)


def test_the_limits_of_the_engines_stand_in_the_profile() -> None:
    found, _ = profile(SHORT)
    assert found.costs.prefill.chunk_tokens == 512
    assert found.costs.prefill.prompts == 1
    assert found.costs.decode.max_batch_size == 32


def test_what_is_to_be_written_is_written_whatever_the_model_thinks_of_it() -> None:
    _, engine = profile(SHORT)
    assert engine.generated and all(request.sampling["ignore_eos"] for request in engine.generated)


def test_prompts_are_ids_of_the_models_vocabulary_and_no_two_requests_share_a_name() -> None:
    _, engine = profile(SHORT)
    requests = engine.prefilled + engine.generated
    assert len({request.rid for request in requests}) == len(requests)
    assert all(0 <= token < VOCABULARY for request in requests for token in request.input_ids)


def test_an_engine_that_keeps_nothing_of_a_prefill_is_profiled_by_what_it_says() -> None:
    async def run() -> ProfiledCosts:
        forgetful = PairCosts(PrefillCosts(0.002, 2e-5, cache_tokens=1), TRUE.decode, TRUE.transfer)
        engine = SimulatedPair(forgetful, endless)
        clock = asyncio.get_running_loop().time
        limits = PairCosts(PrefillCosts(0.0, 0.0), DecodeCosts(0.0))
        return await profile_engine(
            engine, SHORT, limits, vocabulary=VOCABULARY, draws=random.Random(1), clock=clock
        )

    costs = run_virtual(run()).costs.prefill
    assert costs.forward_s + 48 * costs.token_s == pytest.approx(0.002 + 48 * 2e-5, rel=1e-3)


def test_only_what_fits_the_model_and_its_engines_is_timed() -> None:
    few = PairCosts(LIMITS.prefill, DecodeCosts(0.0, cache_tokens=65_536, max_batch_size=4))
    found = Amount().limit_to(1024, few)
    assert found.lengths == (32, 128, 512)
    assert found.batches == (1, 2, 4)


def test_a_context_that_holds_too_few_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"100 tokens of context.*--lengths"):
        Amount().limit_to(100, LIMITS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": (128,)},
        {"lengths": (128, 128, 256)},
        {"lengths": (0, 128, 256)},
        {"batches": ()},
        {"batches": (0, 1)},
    ],
)
def test_lengths_and_batches_that_tell_nothing_are_refused(
    wrong: dict[str, tuple[int, ...]],
) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        Amount(**wrong)  # type: ignore[arg-type]


def test_steps_count_from_where_all_decode_to_where_the_first_ends() -> None:
    first = [(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4)]
    second = [(0.5, 1), (1.0, 2), (2.0, 3), (3.0, 4), (4.0, 5)]
    assert find_joint_steps([first, second], prompt_tokens=10) == build_decode_timing(
        2, 24, steps=2, seconds=2.0
    )


def test_sequences_that_did_not_decode_at_the_same_time_tell_nothing() -> None:
    assert find_joint_steps([[(0.0, 1), (1.0, 2)], [(2.0, 1), (3.0, 2)]], prompt_tokens=10) is None
