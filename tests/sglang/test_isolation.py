"""`limits.isolate_tenants` on real SGLang: what a request finds cached says nothing of another
tenant's prompts.
"""

from collections.abc import Awaitable, Callable
from itertools import count

import orjson
import pytest

from shell_router.core.engine import Generation, Hints
from shell_router.engines.sglang import SglangPair, random_rid
from tests.fakes.pairs_under_test import ON_A_PAIR_AND_ON_A_SERVER, PairUnderTest
from tests.fakes.scripted_pair import collect

pytestmark = [pytest.mark.sglang, ON_A_PAIR_AND_ON_A_SERVER]

TOKENS = 400
ALICE, BOB = Hints(user="alice"), Hints(user="bob")
Asked = Callable[[SglangPair, list[int], Hints], Awaitable[int]]
_salts = count(1)


def prompt() -> list[int]:
    """Ids that no other prompt of this module begins with."""
    salt = next(_salts)
    return [170 + salt, *(20 + (at * salt) % 97 for at in range(TOKENS - 1))]


async def of_update(pair: SglangPair, ids: list[int], tenant: Hints) -> int:
    return (await pair.prefill(Generation(random_rid(), ids, {}, hints=tenant))).cached_tokens


async def of_output(pair: SglangPair, ids: list[int], tenant: Hints) -> int:
    _, finish = await collect(
        pair, Generation(random_rid(), ids, {"max_new_tokens": 2}, hints=tenant)
    )
    return finish.cached_tokens


async def of_native(pair: SglangPair, ids: list[int], tenant: Hints) -> int:
    """Its `meta_info` is what the security report's oracle was."""
    async with pair.forward(
        "prefill_only", orjson.dumps({"input_ids": ids}), hints=tenant
    ) as answer:
        return int(
            orjson.loads(b"".join([chunk async for chunk in answer.chunks]))["meta_info"][
                "cached_tokens"
            ]
        )


@pytest.mark.parametrize("asked", [of_update, of_output, of_native])
@pytest.mark.parametrize("isolates", [False, True])
async def test_two_tenants_see_each_others_cached_tokens_only_without_isolation(
    real_sglang: PairUnderTest, asked: Asked, isolates: bool
) -> None:
    pair, ids = SglangPair(real_sglang.address, isolates=isolates), prompt()
    try:
        await pair.fleet.probe()
        first, again, other = [await asked(pair, ids, tenant) for tenant in (ALICE, ALICE, BOB)]
        assert first <= 1 < TOKENS // 2 < again
        assert (other <= 1) if isolates else (other == again)
        assert await asked(pair, ids, ALICE) == again, "another tenant's prompt takes none of it"
    finally:
        await pair.aclose()
