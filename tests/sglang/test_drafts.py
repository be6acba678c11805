"""Drafted decoding inside real SGLang on the CPU: the outputs are those of plain decoding, in fewer
passes.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from launch.sglang_cpu.pair import CpuPair
from shell_router.core.engine import Finish, Generation, Tokens
from shell_router.engines.address import ServerAddress
from shell_router.engines.sglang import SglangPair, random_rid
from tests.fakes.pairs_under_test import address_of, idle

pytestmark = pytest.mark.sglang

PROMPTS = [[(7 * place + at * at) % 180 + 20 for at in range(40 + place)] for place in range(6)]
GREEDY = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


@pytest.fixture
def servers(own_sglang: CpuPair) -> CpuPair:
    return own_sglang


@pytest_asyncio.fixture(params=["pair", "server"])
async def drafting(request: pytest.FixtureRequest) -> AsyncIterator[SglangPair]:
    if request.param == "pair":
        address = address_of(request.getfixturevalue("own_sglang"))
    else:
        address = ServerAddress(request.getfixturevalue("own_server").url)
    pair = SglangPair(address)
    await pair.fleet.probe()
    yield pair
    await pair.aclose()


def with_drafts(sampling: Mapping[str, Any], *sources: Sequence[int]) -> dict[str, Any]:
    return {**sampling, "custom_params": {"drafts": [list(source) for source in sources]}}


async def written(
    pair: SglangPair, prompt: Sequence[int], sampling: Mapping[str, Any]
) -> tuple[list[int], Finish]:
    """The output's ids and what is said at the end."""
    ids: list[int] = []
    async for event in pair.generate(Generation(random_rid(), list(prompt), dict(sampling))):
        if isinstance(event, Tokens):
            ids += event.ids
        elif isinstance(event, Finish):
            return ids, event
    raise AssertionError("no end")


async def outputs(
    pair: SglangPair, *asked: tuple[Sequence[int], Mapping[str, Any]]
) -> list[list[int]]:
    """Of requests that are sent at once."""
    return [ids for ids, _ in await asyncio.gather(*(written(pair, *one) for one in asked))]


async def test_drafts_change_no_greedy_output(drafting: SglangPair) -> None:
    right = 0
    for prompt in PROMPTS:
        plain, finish = await written(drafting, prompt, GREEDY)
        assert (len(plain), finish.drafted_tokens) == (60, 0), (
            "nothing is drafted that does not ask"
        )
        half, wrong = plain[10:40], plain[:20] + [at % 200 + 20 for at in range(40)]
        for sources in ((), (plain,), (half, wrong)):
            drafted, finish = await written(drafting, prompt, with_drafts(GREEDY, *sources))
            assert drafted == plain, sources
            right += finish.accepted_tokens
    assert right > 100


async def test_drafts_leave_the_distribution_of_samples_as_it_is(drafting: SglangPair) -> None:
    """Three tokens of two choices each: had drafts been verified greedily, half of the outputs were
    never seen.
    """
    sampled = {"temperature": 1.0, "top_k": 2, "max_new_tokens": 3, "ignore_eos": True}
    likely, _ = await written(drafting, PROMPTS[0], GREEDY)
    seen: dict[bool, Counter[tuple[int, ...]]] = {}
    right = 0
    for drafts in (False, True):
        asked = with_drafts(sampled, likely) if drafts else sampled
        found = [
            await asyncio.gather(*(written(drafting, PROMPTS[0], asked) for _ in range(10)))
            for _ in range(30)
        ]
        seen[drafts] = Counter(tuple(ids) for batch in found for ids, _ in batch)
        right += sum(finish.accepted_tokens for batch in found for _, finish in batch)
    apart = sum(
        abs(seen[True][output] - seen[False][output]) for output in seen[True] | seen[False]
    )
    assert apart / 600 < 0.2, seen
    assert right > 0


async def test_a_batch_may_hold_requests_of_every_kind(drafting: SglangPair) -> None:
    kinds: list[dict[str, Any]] = [
        GREEDY,
        {**GREEDY, "temperature": 0.8, "top_k": 1, "min_p": 0.05},
        {**GREEDY, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {**GREEDY, "min_new_tokens": 30, "ignore_eos": False, "logit_bias": {"40": 1.5}},
        {**GREEDY, "max_new_tokens": 23},
    ]
    plain = list(zip(PROMPTS, kinds, strict=False))
    alone = [(await written(drafting, *one))[0] for one in plain]
    asking = [
        (prompt, with_drafts(kind, text)) for (prompt, kind), text in zip(plain, alone, strict=True)
    ]
    mixed = [one for both in zip(plain, asking, strict=True) for one in both]
    twice = [text for text in alone for _ in range(2)]
    for _ in range(3):
        *found, _ = await outputs(drafting, *mixed, (PROMPTS[0], {**GREEDY, "temperature": 1.0}))
        assert found == twice


async def test_a_grammar_in_the_batch_keeps_its_output(drafting: SglangPair) -> None:
    constrained = {**GREEDY, "regex": "(apple|river){1,4}", "ignore_eos": False}
    try:
        alone, _ = await written(drafting, PROMPTS[0], constrained)
    except Exception as error:
        pytest.skip(f"no grammar backend: {error}")
    text, _ = await written(drafting, PROMPTS[1], GREEDY)
    asked = [(PROMPTS[0], with_drafts(constrained)), (PROMPTS[1], with_drafts(GREEDY, text))]
    assert await outputs(drafting, *asked) == [alone, text]


async def body_of(
    servers: CpuPair, session: aiohttp.ClientSession, room: int, **body: Any
) -> dict[str, Any]:
    """What decode answers to a request of SGLang's own interface."""
    place = {
        "bootstrap_host": servers.bootstrap_host,
        "bootstrap_port": servers.bootstrap_port,
        "bootstrap_room": room,
    }

    async def sent(url: str) -> dict[str, Any]:
        async with session.post(f"{url}/generate", json={**body, **place}) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    _, answer = await asyncio.gather(sent(servers.prefill.url), sent(servers.decode.url))
    return answer


async def test_a_stop_string_within_a_draft_ends_the_output_there(
    servers: CpuPair, session: aiohttp.ClientSession
) -> None:
    plain = await body_of(servers, session, 1, input_ids=PROMPTS[0], sampling_params=GREEDY)
    middle = plain["text"].split()[8]
    stopping = {**GREEDY, "stop": [middle]}
    stopped = await body_of(servers, session, 2, input_ids=PROMPTS[0], sampling_params=stopping)
    asking = with_drafts(stopping, plain["output_ids"])
    drafted = await body_of(servers, session, 3, input_ids=PROMPTS[0], sampling_params=asking)
    assert drafted["text"] == stopped["text"]
    assert drafted["output_ids"] == stopped["output_ids"]
    assert drafted["meta_info"]["finish_reason"] == stopped["meta_info"]["finish_reason"]


async def test_meta_info_tells_of_drafts_where_there_were_any(
    servers: CpuPair, session: aiohttp.ClientSession
) -> None:
    plain = await body_of(servers, session, 4, input_ids=PROMPTS[1], sampling_params=GREEDY)
    assert "spec_verify_ct" not in plain["meta_info"]
    asking = with_drafts(GREEDY, plain["output_ids"])
    for room in (5, 6):  # the first may still learn what passes cost
        meta = (
            await body_of(servers, session, room, input_ids=PROMPTS[1], sampling_params=asking)
        )["meta_info"]
    assert 0 < meta["spec_verify_ct"] < 60
    assert 0 < meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]


async def test_logprobs_are_those_of_a_plain_request_next_to_drafted_ones(
    servers: CpuPair, session: aiohttp.ClientSession
) -> None:
    plain = await body_of(
        servers,
        session,
        7,
        input_ids=PROMPTS[2],
        sampling_params=GREEDY,
        return_logprob=True,
        top_logprobs_num=2,
    )
    asking = with_drafts(GREEDY, plain["output_ids"])
    both = await asyncio.gather(
        *(
            body_of(
                servers, session, room, input_ids=PROMPTS[2], sampling_params=asking, return_logprob=wanted,
                top_logprobs_num=2 * wanted,
            )
            for room, wanted in ((8, True), (9, False))
        )
    )  # fmt: skip
    assert both[0]["output_ids"] == both[1]["output_ids"] == plain["output_ids"]
    values = [
        [one[0] for one in answer["meta_info"]["output_token_logprobs"]]
        for answer in (plain, both[0])
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert len(both[0]["meta_info"]["output_top_logprobs"]) == len(
        plain["meta_info"]["output_top_logprobs"]
    )


async def test_an_aborted_request_leaves_nothing(
    drafting: SglangPair, session: aiohttp.ClientSession
) -> None:
    long = with_drafts({**GREEDY, "max_new_tokens": 20000})
    requests = [asyncio.create_task(written(drafting, prompt, long)) for prompt in PROMPTS]
    await asyncio.sleep(1)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    urls = [str(server.server.url) for server in drafting.fleet.servers]
    await idle(session, *urls, limit_s=20)


async def test_drafts_that_are_nonsense_harm_no_request(
    servers: CpuPair, session: aiohttp.ClientSession
) -> None:
    plain = await body_of(servers, session, 10, input_ids=PROMPTS[3], sampling_params=GREEDY)
    first, *others = plain["output_ids"]
    for room, nonsense in enumerate(
        ([[first, others[0], 10**9, -5, others[1]]], "text", [["a"]], [7], {}), 11
    ):
        sampling = {**GREEDY, "custom_params": {"drafts": nonsense}}
        found = await body_of(
            servers, session, room, input_ids=PROMPTS[3], sampling_params=sampling
        )
        assert found["output_ids"] == plain["output_ids"], nonsense


async def test_decode_says_that_it_drafts(servers: CpuPair, session: aiohttp.ClientSession) -> None:
    for url, drafts in ((servers.prefill.url, False), (servers.decode.url, True)):
        async with session.get(f"{url}/shell_router/capabilities") as response:
            assert (await response.json())["drafts"] is drafts
