"""The plugin inside real SGLang: what it adds, and that it leaves everything else as it was."""

from itertools import count
from typing import Any

import aiohttp
import pytest

from shell_router.sglang_plugin.patches import FAKE_BOOTSTRAP_HOST
from shell_router.sglang_plugin.routes import CONTRACT
from tests.fakes.pairs_under_test import PairUnderTest

pytestmark = pytest.mark.sglang

_unique = count(1)


def prompt(length: int) -> list[int]:
    """Ids that no other prompt of this run begins with."""
    salt = next(_unique)
    return [20 + salt % 100, 20 + salt // 100, *(150 + at % 100 for at in range(length - 2))]


async def answer(session: aiohttp.ClientSession, url: str, **body: Any) -> Any:
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_both_servers_say_what_they_offer(
    session: aiohttp.ClientSession, real_sglang: PairUnderTest
) -> None:
    for role, url in (
        ("prefill", real_sglang.address.prefill_url),
        ("decode", real_sglang.address.decode_url),
    ):
        async with session.get(f"{url}/shell_router/capabilities") as response:
            found = await response.json()
        assert (found["contract"], found["disaggregation_mode"]) == (CONTRACT, role)
        assert found["prefill_only"] is (role == "prefill")
        assert found["sglang_version"].startswith("0.5.")


async def test_only_a_prefill_server_has_the_route(
    session: aiohttp.ClientSession, real_sglang: PairUnderTest
) -> None:
    async with session.post(
        f"{real_sglang.address.decode_url}/prefill_only", json={"input_ids": [1]}
    ) as response:
        assert response.status == 404


async def test_each_update_of_a_prompt_finds_the_one_before(
    session: aiohttp.ClientSession, real_sglang: PairUnderTest
) -> None:
    url = f"{real_sglang.address.prefill_url}/prefill_only"
    ids = prompt(2000)
    found = [
        (await answer(session, url, input_ids=ids[:end]))["meta_info"]
        for end in (500, 1000, 1500, 2000, 2000)
    ]
    first, *later = (meta["cached_tokens"] for meta in found)
    assert first <= 1  # another test's prompt may begin with the same token
    assert later == [500, 1000, 1500, 1999]
    assert [meta["prompt_tokens"] for meta in found] == [500, 1000, 1500, 2000, 2000]


async def test_an_answer_has_the_shape_of_generate_and_one_token(
    session: aiohttp.ClientSession, real_sglang: PairUnderTest
) -> None:
    sampling = {"max_new_tokens": 30, "min_new_tokens": 20, "temperature": 0}
    url = f"{real_sglang.address.prefill_url}/prefill_only"
    found = await answer(
        session, url, input_ids=prompt(40), rid="shape", sampling_params=sampling, stream=True
    )
    assert found["meta_info"]["id"] == "shape"
    assert found["meta_info"]["completion_tokens"] == len(found["output_ids"]) == 1


async def test_a_batch_is_answered_in_order(
    session: aiohttp.ClientSession, real_sglang: PairUnderTest
) -> None:
    url = f"{real_sglang.address.prefill_url}/prefill_only"
    found = await answer(session, url, input_ids=[prompt(30), prompt(50)])
    assert [one["meta_info"]["prompt_tokens"] for one in found] == [30, 50]


async def test_other_requests_with_the_fake_host_stay_out_of_the_cache(
    session: aiohttp.ClientSession, real_sglang: PairUnderTest
) -> None:
    """SGLang's own rule for its warm-ups, which the plugin must not widen."""
    url = f"{real_sglang.address.prefill_url}/generate"
    ids = prompt(200)
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1},
        "bootstrap_host": FAKE_BOOTSTRAP_HOST,
    }
    for room, port in ((1, None), (2, 8998), (3, None)):
        meta = (await answer(session, url, **body, bootstrap_room=room, bootstrap_port=port))[
            "meta_info"
        ]
        assert meta["cached_tokens"] <= 1


async def test_a_prompt_over_the_context_is_refused_in_words(
    session: aiohttp.ClientSession, real_sglang: PairUnderTest
) -> None:
    url = f"{real_sglang.address.prefill_url}/prefill_only"
    async with session.post(
        url, json={"input_ids": prompt(real_sglang.context_length + 1)}
    ) as response:
        assert response.status == 400
        assert "context length" in await response.text()
