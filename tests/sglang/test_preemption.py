"""A batch's output on real SGLang, which leaves its engines to an online request and goes on."""

import asyncio

import aiohttp
import pytest

from shell_router.core.engine import Finish, Generation, Hints, ServedModel, Tokens
from shell_router.engines.sglang import SglangPair, random_rid
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.preemption import generate_preemptibly
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.queue import QueueSettings
from tests.fakes.api_server import until
from tests.fakes.pairs_under_test import ON_A_PAIR_AND_ON_A_SERVER, PairUnderTest, idle
from tests.fakes.scripted_pair import collect

pytestmark = [pytest.mark.sglang, ON_A_PAIR_AND_ON_A_SERVER]

GREEDY = {"temperature": 0, "ignore_eos": True}
TOKENS = 400


async def test_an_online_request_takes_the_place_of_a_batchs_which_goes_on_afterwards(
    real_sglang: PairUnderTest,
) -> None:
    one_at_a_time = SchedulingSettings(queue=QueueSettings(max_running=1))
    pair = SglangPair(real_sglang.address, scheduling=one_at_a_time)
    await pair.fleet.probe()
    tokenizer = HfTokenizer.from_folder(real_sglang.needs_model())
    model = ServedModel("small", pair, tokenizer, real_sglang.context_length)
    ids = tokenizer.encode("How many pens does Tom have now? " * 4)
    request = Generation(
        random_rid(), ids, {**GREEDY, "max_new_tokens": TOKENS}, hints=Hints(tier="batch")
    )
    lost = list[int]()
    *_, decode = pair.fleet.dispatchers.values()

    async def answer() -> tuple[int, Finish]:
        tokens = 0
        async for item in generate_preemptibly(model, request, lost.append):
            if isinstance(item, Finish):
                return tokens, item
            assert isinstance(item, Tokens)
            tokens += len(item.ids)
        raise AssertionError("no finish")

    line = asyncio.create_task(answer())
    await until(lambda: decode.tracked[0].batch_load.held_tokens >= len(ids) + 20, limit_s=60.0)
    _, online = await collect(pair, Generation(random_rid(), ids, {**GREEDY, "max_new_tokens": 8}))
    assert online.completion_tokens == 8 and not line.done() and len(lost) == 1
    tokens, finish = await line
    assert tokens == finish.completion_tokens == TOKENS and finish.prompt_tokens == len(ids)
    assert len(lost) == 1, "it was preempted once"
    await pair.aclose()
    async with aiohttp.ClientSession() as session:
        await idle(session, *real_sglang.urls, limit_s=60)
