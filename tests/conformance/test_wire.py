"""What the router needs of a model's servers on the wire, asked of every kind of pair and of
undivided servers in the same words.

Each point is checked on the raw HTTP answers, and where the router reads them, through its own
client as well.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, get_args

import aiohttp
import orjson
import pytest
import pytest_asyncio

from shell_router.core.engine import Finish, Generation, Tokens
from shell_router.engines.prefill_only import PrefillWay
from shell_router.engines.sglang import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.errors import PromptTooLong
from tests.fakes.pairs_under_test import (
    PairUnderTest,
    ServerAddress,
    embedded,
    of_model,
    running,
    scripted,
    undivided,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

Output = dict[str, Any]
_unique = count(1)


@dataclass(frozen=True)
class Wire:
    """A pair or an undivided server, spoken to without the router's client."""

    under_test: PairUnderTest
    session: aiohttp.ClientSession

    @property
    def urls(self) -> list[str]:
        return self.under_test.urls

    @property
    def is_pair(self) -> bool:
        return len(self.urls) == 2

    def body(self, ids: list[int], new_tokens: int = 12, **more: Any) -> dict[str, Any]:
        """A greedy request of a fixed length, with the fields that pair its legs, if it has two."""
        sampling = {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
            **more.pop("sampling", {}),
        }
        pairing = {**self.under_test.address.bootstrap, "rid": f"wire-{next(_unique)}"}
        if self.is_pair:
            pairing["bootstrap_room"] = next(_unique) + 2**40
        return {"input_ids": ids, "sampling_params": sampling, **pairing, **more}

    async def post(self, url: str, route: str, body: object) -> tuple[int, bytes]:
        sent = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with self.session.post(f"{url}/{route}", data=sent, headers=headers) as answer:
            return answer.status, await answer.read()

    async def get(self, url: str, route: str) -> Any:
        async with self.session.get(f"{url}/{route}") as answer:
            assert answer.status == 200
            return orjson.loads(await answer.read() or b"null")

    async def pair(self, body: dict[str, Any]) -> tuple[Output, Output]:
        """The legs' whole answers to one body: prefill's, then decode's, which may be one."""
        answers = await asyncio.gather(*(self.post(url, "generate", body) for url in self.urls))
        assert {status for status, _ in answers} == {200}, answers
        return orjson.loads(answers[0][1]), orjson.loads(answers[-1][1])

    async def stream(self, body: dict[str, Any]) -> list[bytes]:
        """The payloads of decode's stream."""
        *prefill, decode = self.urls
        answers = await asyncio.gather(
            *(self.post(url, "generate", {**body, "stream": False}) for url in prefill),
            self.post(decode, "generate", {**body, "stream": True}),
        )
        return [line[6:] for line in answers[-1][1].split(b"\n") if line.startswith(b"data: ")]

    async def until_idle(self) -> None:
        """Return once no server has a request; fails after half a minute."""
        async with asyncio.timeout(30):
            while await self.held():  # noqa: ASYNC110 - the engine is another process
                await asyncio.sleep(0)

    async def held(self) -> int:
        found = [await self.get(url, "v1/loads") for url in self.urls]
        ranks = [rank for one in found for rank in one["loads"]]
        return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks)


def prompt(length: int = 40) -> list[int]:
    """A prompt that shares no prefix with any other of this run."""
    salt = next(_unique)
    return [
        20 + salt // 150 % 150,
        20 + salt % 150,
        *(20 + (salt * 31 + at * 7) % 150 for at in range(length - 2)),
    ]


def folded(payloads: list[bytes]) -> tuple[list[int], str, list[list[Any]]]:
    """Ids, text and logprobs of a whole stream, incremental or cumulative."""
    ids: list[int] = []
    text, logprobs = "", []
    for payload in payloads[:-1]:
        event = orjson.loads(payload)
        if len(event["output_ids"]) == event["meta_info"]["completion_tokens"]:
            ids, text, logprobs = [], "", []
        ids += event["output_ids"]
        text += event["text"]
        logprobs += event["meta_info"].get("output_token_logprobs", [])
    return ids, text, logprobs


@pytest.fixture(
    scope="module",
    params=[
        "scripted",
        "scripted_cumulative",
        "embedded",
        "embedded_cumulative",
        "undivided",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("sglang_undivided", marks=pytest.mark.sglang),
    ],
)
def starting(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[PairUnderTest]:
    kind, _, mode = request.param.partition("_")
    if kind == "scripted":
        return scripted(incremental=not mode)
    if kind == "embedded":
        return running(embedded(request.getfixturevalue("engines"), incremental=not mode))
    if kind == "undivided":
        return undivided()
    if mode:
        server = request.getfixturevalue("own_server")
        model = request.getfixturevalue("sglang_model")
        return running(of_model(ServerAddress(server.url), model))
    return running(request.getfixturevalue("real_sglang"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(starting: AbstractAsyncContextManager[PairUnderTest]) -> AsyncIterator[Wire]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with starting as under_test, aiohttp.ClientSession(connector=connector) as session:
        yield Wire(under_test, session)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(wire: Wire) -> AsyncIterator[SglangPair]:
    pair = SglangPair(wire.under_test.address)
    await pair.fleet.probe()
    yield pair
    await pair.aclose()


async def collect(
    client: SglangPair, request: Generation
) -> tuple[list[int], str, list[float], Finish]:
    ids: list[int] = []
    text, logprobs, finish = "", [], None
    async for event in client.generate(request):
        if isinstance(event, Tokens):
            ids += event.ids
            text += event.text
            logprobs += event.logprobs
        else:
            assert finish is None
            finish = event
    assert finish is not None
    return ids, text, logprobs, finish


def generation(body: dict[str, Any]) -> Generation:
    """The same request for the router's client."""
    return Generation(
        f"{body['rid']}-client",
        body["input_ids"],
        body["sampling_params"],
        logprobs=body.get("return_logprob", False),
    )


async def test_streamed_and_whole_answers_agree(wire: Wire, client: SglangPair) -> None:
    ids = prompt()
    _, whole = await wire.pair(wire.body(ids))
    payloads = await wire.stream(wire.body(ids))
    assert payloads[-1] == b"[DONE]"
    assert folded(payloads)[:2] == (whole["output_ids"], whole["text"])
    seen_ids, text, _, _ = await collect(client, generation(wire.body(ids)))
    assert (seen_ids, text) == (whole["output_ids"], whole["text"])


async def test_only_the_last_event_has_a_finish_reason(wire: Wire) -> None:
    events = [orjson.loads(payload) for payload in (await wire.stream(wire.body(prompt())))[:-1]]
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (
        len(events) - 1
    ) + [False]


async def test_a_stream_sends_its_first_token_and_then_as_many_at_a_time_as_were_asked_for(
    wire: Wire,
) -> None:
    body = wire.body(prompt(), new_tokens=10)
    body["sampling_params"]["stream_interval"] = 4
    events = [orjson.loads(payload) for payload in (await wire.stream(body))[:-1]]
    written = [event["meta_info"]["completion_tokens"] for event in events]
    assert written[-1] == 10
    assert all(later - earlier >= 4 for earlier, later in pairwise(written[:-1]))


async def test_counts_and_the_length_reason(wire: Wire, client: SglangPair) -> None:
    body = wire.body(prompt(33), new_tokens=7)
    _, whole = await wire.pair(body)
    meta = whole["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["id"]) == (33, 7, body["rid"])
    assert len(whole["output_ids"]) == 7
    _, _, _, finish = await collect(client, generation(wire.body(prompt(33), new_tokens=7)))
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 33, 7)


async def test_log_probabilities_come_one_for_each_id(wire: Wire, client: SglangPair) -> None:
    ids = prompt()
    _, whole = await wire.pair(wire.body(ids, return_logprob=True))
    rows = whole["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in rows] == whole["output_ids"]
    assert all(logprob <= 0 for logprob, _, _ in rows)
    streamed = folded(await wire.stream(wire.body(ids, return_logprob=True)))[2]
    assert [token for _, token, _ in streamed] == whole["output_ids"]
    seen_ids, _, logprobs, _ = await collect(
        client, generation(wire.body(ids, return_logprob=True))
    )
    assert seen_ids == whole["output_ids"]
    assert logprobs == pytest.approx([logprob for logprob, _, _ in rows], abs=1e-4)


async def test_a_stop_token_ends_the_output_and_is_its_last_id(
    wire: Wire, client: SglangPair
) -> None:
    ids = prompt()
    _, whole = await wire.pair(wire.body(ids))
    stop = whole["output_ids"][5]
    sampling = {"stop_token_ids": [stop], "ignore_eos": False}
    first = whole["output_ids"].index(stop)
    _, stopped = await wire.pair(wire.body(ids, sampling=sampling))
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["output_ids"] == whole["output_ids"][: first + 1]
    assert whole["text"].startswith(stopped["text"])
    for logprobs in (False, True):
        body = wire.body(ids, sampling=sampling, return_logprob=logprobs)
        seen_ids, text, found, finish = await collect(client, generation(body))
        assert seen_ids == whole["output_ids"][:first]
        assert (text, finish.reason, finish.completion_tokens) == (
            stopped["text"],
            "stop",
            first + 1,
        )
        assert len(found) == (first if logprobs else 0)


async def test_a_stop_string_ends_the_output_before_it(wire: Wire, client: SglangPair) -> None:
    wire.under_test.needs_model()
    ids = prompt()
    _, whole = await wire.pair(wire.body(ids))
    text = whole["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    _, stopped = await wire.pair(wire.body(ids, sampling={"stop": [stop]}))
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == text[: text.index(stop)]
    _, seen, _, finish = await collect(
        client, generation(wire.body(ids, sampling={"stop": [stop]}))
    )
    assert (seen, finish.reason) == (stopped["text"], "stop")


async def test_prefill_only_finds_what_was_prefilled_before(wire: Wire, client: SglangPair) -> None:
    ids = prompt(400)
    before = 0
    for end in (100, 200, 300, 400):
        found = await client.prefill(Generation(f"grow-{next(_unique)}", ids[:end]))
        assert found.prompt_tokens == end
        assert found.cached_tokens >= 0.99 * before
        assert found.cached_tokens <= max(before, 1)
        before = end
    again = await client.prefill(Generation(f"grow-{next(_unique)}", ids))
    assert again.cached_tokens == 399  # the last token is always computed again
    *_, finish = await collect(
        client, Generation("final", [*ids, 30, 31], {"max_new_tokens": 2, "temperature": 0})
    )
    assert finish.cached_tokens >= 0.99 * 400


async def test_incremental_prefill_changes_no_output(wire: Wire, client: SglangPair) -> None:
    ids = prompt(60)
    _, cold = await wire.pair(wire.body(ids))
    warm = prompt(60)
    expected = await collect(client, generation(wire.body(warm)))
    for end in (20, 40, 60):
        await client.prefill(Generation(f"inc-{next(_unique)}", ids[:end]))
    assert (await collect(client, generation(wire.body(ids))))[0] == cold["output_ids"]
    assert (await collect(client, generation(wire.body(warm))))[:2] == expected[:2]


async def test_decode_reports_the_prefills_cached_tokens(wire: Wire) -> None:
    ids = prompt(80)
    await wire.pair(wire.body(ids))
    prefill, decode = await wire.pair(wire.body(ids))
    assert prefill["meta_info"]["cached_tokens"] == decode["meta_info"]["cached_tokens"] == 79


async def test_an_abort_ends_the_stream_and_frees_the_servers(wire: Wire) -> None:
    body = wire.body(prompt(), new_tokens=1500, stream=True)
    headers = {"Content-Type": "application/json"}
    sent = orjson.dumps(body)
    prefill = asyncio.gather(
        *(wire.post(url, "generate", {**body, "stream": False}) for url in wire.urls[:-1])
    )
    async with wire.session.post(f"{wire.urls[-1]}/generate", data=sent, headers=headers) as answer:
        received = await answer.content.readuntil(b"\n")
        assert (await wire.post(wire.urls[-1], "abort_request", {"rid": body["rid"]}))[0] == 200
        received += await answer.content.read()
    await prefill
    last = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")][-1]
    assert orjson.loads(last)["meta_info"]["finish_reason"]["type"] == "abort"
    await wire.until_idle()


async def test_a_caller_that_leaves_frees_the_servers(wire: Wire, client: SglangPair) -> None:
    async with aclosing(
        client.generate(generation(wire.body(prompt(), new_tokens=1500)))
    ) as stream:
        await anext(stream)
        while not await wire.held():  # SGLang tells its load every 15 steps of its decoding
            await anext(stream)
    await client.aclose()
    await wire.until_idle()


async def test_aborting_an_unknown_request_is_no_error(wire: Wire) -> None:
    for url in wire.urls:
        assert (await wire.post(url, "abort_request", {"rid": "unknown"}))[0] == 200


async def test_a_request_without_a_room_is_refused_by_both(wire: Wire) -> None:
    if not wire.is_pair:
        pytest.skip("an undivided server needs no room")
    body = wire.body(prompt())
    del body["bootstrap_room"]
    for url in wire.urls:
        status, answer = await wire.post(url, "generate", body)
        assert status == 400
        assert b"bootstrap room" in answer
    await wire.until_idle()


async def test_a_prompt_over_the_context_is_refused_by_both(wire: Wire, client: SglangPair) -> None:
    body = wire.body(prompt(wire.under_test.context_length + 1))
    for url in wire.urls:
        status, answer = await wire.post(url, "generate", body)
        assert status == 400
        assert b"context length" in answer
    with pytest.raises(PromptTooLong):
        await collect(client, generation(body))
    await client.aclose()
    await wire.until_idle()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"{}",
        b'{"input_ids": "words", "bootstrap_room": 1}',
        b'{"input_ids": [1], "sampling_params": {"max_new_tokens": -1}, "bootstrap_room": 1}',
    ],
)
async def test_bad_bodies_get_a_4xx(wire: Wire, body: bytes) -> None:
    for url in wire.urls:
        status, _ = await wire.post(url, "generate", body)
        assert 400 <= status < 500
    await wire.until_idle()


async def test_unknown_fields_change_nothing(wire: Wire) -> None:
    ids = prompt()
    _, plain = await wire.pair(wire.body(ids))
    _, with_more = await wire.pair(
        wire.body(ids, user="someone", a_field_of_next_year={"deep": [1, None]})
    )
    assert with_more["output_ids"] == plain["output_ids"]


async def test_text_is_tokenized_as_the_router_tokenizes_it(wire: Wire) -> None:
    tokenizer = HfTokenizer.from_folder(wire.under_test.needs_model())
    text = f"Question {next(_unique)}: où est la 東京 tower? 😀 Answer in 3 words."
    body = wire.body([])
    del body["input_ids"]
    _, by_text = await wire.pair({**body, "text": text})
    _, by_ids = await wire.pair(wire.body(tokenizer.encode(text)))
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == len(tokenizer.encode(text))


async def test_streamed_text_has_no_broken_characters(wire: Wire) -> None:
    """Many prompts of bytes that are parts of characters: what is streamed adds up to the whole
    text.
    """
    for _ in range(5):
        ids = prompt()
        _, whole = await wire.pair(wire.body(ids, new_tokens=32))
        assert folded(await wire.stream(wire.body(ids, new_tokens=32)))[1] == whole["text"]


async def test_requests_together_answer_as_alone(wire: Wire, client: SglangPair) -> None:
    bodies = [wire.body(prompt(20 + 5 * index)) for index in range(8)]
    alone = [(await wire.pair(body))[1]["output_ids"] for body in bodies]
    together = await asyncio.gather(*(collect(client, generation(body)) for body in bodies))
    assert [ids for ids, *_ in together] == alone
    await wire.until_idle()


async def test_a_relayed_request_gets_decodes_answer(wire: Wire, client: SglangPair) -> None:
    ids = prompt()
    _, whole = await wire.pair(wire.body(ids))
    sent = {"input_ids": ids, "sampling_params": wire.body(ids)["sampling_params"]}
    async with client.forward("generate", orjson.dumps(sent)) as answer:
        relayed = orjson.loads(b"".join([chunk async for chunk in answer.chunks]))
    assert (answer.status, relayed["output_ids"]) == (200, whole["output_ids"])
    async with client.forward("prefill_only", orjson.dumps(sent)) as answer:
        relayed = orjson.loads(b"".join([chunk async for chunk in answer.chunks]))
    assert (answer.status, relayed["meta_info"]["cached_tokens"]) == (200, len(ids) - 1)
    await client.aclose()
    await wire.until_idle()


async def test_each_server_says_what_it_is(wire: Wire) -> None:
    for server, url in zip(wire.under_test.address.servers, wire.urls, strict=True):
        assert (await wire.get(url, "model_info"))["disaggregation_mode"] == server.mode
        assert (await wire.get(url, "server_info"))["disaggregation_mode"] == server.mode


async def test_loads_count_requests_and_tokens(wire: Wire, client: SglangPair) -> None:
    await client.fleet.ready()
    for url in wire.urls:
        for rank in (await wire.get(url, "v1/loads"))["loads"]:
            assert {"dp_rank", "num_running_reqs", "num_waiting_reqs"} <= rank.keys()
            assert 0 <= rank["token_usage"] <= 1
            assert 0 <= rank["num_used_tokens"] <= rank["max_total_num_tokens"]
    reports = [await server.report() for server in client.fleet.servers]
    assert {report.running for report in reports} == {0}


async def test_the_probe_found_a_way_to_prefill_only(client: SglangPair) -> None:
    assert set(client.fleet.prefill_ways) <= set(get_args(PrefillWay))


async def test_the_prefills_answer_holds_one_input_log_probability_per_prompt_token_from_the_asked_start(
    wire: Wire,
) -> None:
    ids = prompt(600)  # more than one chunk
    _, plain = await wire.pair(wire.body(ids))
    first_rows: list[list[Any]] = []
    for start in (0, 300, 520, 599):
        prefill, decode = await wire.pair(
            wire.body(ids, return_logprob=True, logprob_start_len=start)
        )
        assert decode["output_ids"] == plain["output_ids"]
        rows = prefill["meta_info"]["input_token_logprobs"]
        first_rows = first_rows or rows
        assert [token for _, token, _ in rows] == ids[start:]
        assert rows[0][0] is None
        found = [logprob for logprob, _, _ in rows[1:]]
        assert found == pytest.approx(
            [logprob for logprob, _, _ in first_rows[start + 1 :]], abs=1e-4
        )
        assert prefill["meta_info"]["cached_tokens"] == start  # what follows is computed again
        assert not wire.is_pair or decode["meta_info"]["input_token_logprobs"] == []


async def test_an_input_log_probability_is_that_with_which_the_token_would_be_generated(
    wire: Wire,
) -> None:
    last = (
        wire.under_test.vocabulary - 1
    )  # SGLang calls it 0 among the prompt's, as it does what stands for images
    generated = [last]
    while last in generated:
        ids = prompt()
        _, whole = await wire.pair(wire.body(ids, return_logprob=True))
        generated = whole["output_ids"][:-1]
    prefill, _ = await wire.pair(
        wire.body([*ids, *generated], return_logprob=True, logprob_start_len=len(ids) - 1)
    )
    rows = prefill["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in rows[1:]] == generated
    expected = [logprob for logprob, *_ in whole["meta_info"]["output_token_logprobs"][:-1]]
    assert [logprob for logprob, *_ in rows[1:]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("start", [{}, {"logprob_start_len": None}, {"logprob_start_len": -1}])
async def test_without_a_start_neither_answer_holds_input_log_probabilities(
    wire: Wire, start: dict[str, int | None]
) -> None:
    ids = prompt()
    await wire.pair(wire.body(ids))
    prefill, decode = await wire.pair(wire.body(ids, return_logprob=True, **start))
    assert (
        prefill["meta_info"]["input_token_logprobs"]
        == decode["meta_info"]["input_token_logprobs"]
        == []
    )
    assert prefill["meta_info"]["cached_tokens"] == 39


async def test_a_start_behind_the_prompt_is_refused_by_both(wire: Wire) -> None:
    body = wire.body(prompt(), return_logprob=True, logprob_start_len=41)
    for url in wire.urls:
        status, _ = await wire.post(url, "generate", body)
        assert status == 400
    await wire.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_relayed_answer_holds_its_prompts_log_probabilities(
    wire: Wire, client: SglangPair, stream: bool
) -> None:
    ids = prompt()
    sent = wire.body(ids, return_logprob=True, logprob_start_len=0, stream=stream)
    del sent["rid"]
    body = {name: value for name, value in sent.items() if not name.startswith("bootstrap_")}
    async with client.forward("generate", orjson.dumps(body)) as answer:
        relayed = b"".join([chunk async for chunk in answer.chunks])
    payloads = (
        [line[6:] for line in relayed.split(b"\n") if line.startswith(b"data: ")]
        if stream
        else [relayed, b"[DONE]"]
    )
    assert payloads.pop() == b"[DONE]"
    outputs = [orjson.loads(payload) for payload in payloads]
    assert len(outputs) > 0 and all(output["output_ids"] for output in outputs)
    for output in outputs:
        assert [token for _, token, _ in output["meta_info"]["input_token_logprobs"]] == ids
    await client.aclose()
    await wire.until_idle()
