"""The embedded pair over HTTP, against transformers' own generation."""

import asyncio
import itertools
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shell_router.standins.embedded.fleet import EmbeddedPair
from shell_router.standins.embedded.settings import EmbeddedSettings
from tests.fakes.shared_engines import SharedEngines

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
GREEDY: Json = {"temperature": 0, "ignore_eos": True}
LIMIT_S = 20.0


@dataclass(frozen=True)
class Client:
    """Both legs of a request, as a router sends them."""

    http: aiohttp.ClientSession
    pair: EmbeddedPair

    def body(self, **fields: Any) -> Json:
        room = random.getrandbits(62)
        address = {
            "bootstrap_host": self.pair.address.bootstrap_host,
            "bootstrap_port": self.pair.address.bootstrap_port,
        }
        return {**address, "bootstrap_room": room, **fields}

    async def post(self, url: str, body: Any) -> tuple[int, Any]:
        async with asyncio.timeout(LIMIT_S), self.http.post(url, json=body) as response:
            content = await response.read()
            return response.status, json.loads(content) if content else None

    async def prefill(self, body: Json) -> tuple[int, Any]:
        return await self.post(
            f"{self.pair.address.prefill_url}/generate", {**body, "stream": False}
        )

    async def decode(self, body: Json) -> tuple[int, Any]:
        return await self.post(f"{self.pair.address.decode_url}/generate", body)

    async def generate(self, **fields: Any) -> Json:
        """The decode leg's answer."""
        body = self.body(**fields)
        (prefill_status, _), (status, answer) = await asyncio.gather(
            self.prefill(body), self.decode(body)
        )
        assert (prefill_status, status) == (200, 200), answer
        return answer  # type: ignore[no-any-return]

    async def stream(self, **fields: Any) -> list[Json]:
        """The decode leg's events, without the end mark."""
        body = self.body(stream=True, **fields)
        prefill = asyncio.create_task(self.prefill(body))
        async with (
            asyncio.timeout(LIMIT_S),
            self.http.post(f"{self.pair.address.decode_url}/generate", json=body) as response,
        ):
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        await prefill
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def prefill_only(self, input_ids: list[int]) -> Json:
        status, answer = await self.post(
            f"{self.pair.address.prefill_url}/prefill_only", {"input_ids": input_ids}
        )
        assert status == 200
        return answer["meta_info"]  # type: ignore[no-any-return]

    async def abort(self, url: str, rid: str) -> None:
        async with self.http.post(f"{url}/abort_request", json={"rid": rid}) as response:
            assert response.status == 200

    async def load(self, url: str) -> Json:
        async with self.http.get(f"{url}/v1/loads") as response:
            return (await response.json())["loads"][0]  # type: ignore[no-any-return]

    async def until(self, url: str, holds: Callable[[Json], bool]) -> None:
        """Ask for the load until `holds` is true of it."""
        async with asyncio.timeout(LIMIT_S):
            while not holds(await self.load(url)):
                pass

    async def until_idle(self) -> None:
        for url in (self.pair.address.prefill_url, self.pair.address.decode_url):
            await self.until(url, idle)


def idle(load: Json) -> bool:
    counts = [load[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")]
    queues = [size for size in load["disaggregation"].values() if isinstance(size, int)]
    return not any(counts + queues)


@dataclass(frozen=True)
class Reference:
    """The same folder, run by transformers."""

    network: Any
    tokenizer: Tokenizer

    def continue_greedily(self, input_ids: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            output = self.network.generate(
                torch.tensor([input_ids]), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        return output[0, len(input_ids) :].tolist()  # type: ignore[no-any-return]

    def logprobs(self, input_ids: list[int], output_ids: list[int]) -> list[float]:
        with torch.inference_mode():
            logits = self.network(torch.tensor([input_ids + output_ids])).logits[0]
        scores = torch.log_softmax(logits, -1)
        return [
            float(scores[len(input_ids) - 1 + at, token]) for at, token in enumerate(output_ids)
        ]


ARCHITECTURES = ("qwen3", "llama")


@pytest.fixture(scope="module")
def folders(engines: SharedEngines) -> dict[str, Path]:
    return {name: engines.model(architecture=name, seed=5) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    return {name: load_reference(folder) for name, folder in folders.items()}


def load_reference(folder: Path) -> Reference:
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return Reference(network, Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(
    engines: SharedEngines, folders: dict[str, Path]
) -> AsyncIterator[dict[str, Client]]:
    qwen3, llama = (str(folders[name]) for name in ARCHITECTURES)
    pairs = {
        "qwen3": EmbeddedSettings(
            qwen3, dtype="float64", chunked_prefill_size=64, max_running_requests=12
        ),
        "llama": EmbeddedSettings(llama, dtype="float64", incremental_streaming_output=True),
        "impatient": EmbeddedSettings(
            qwen3, kv_wait_s=0.3, max_total_tokens=400, context_length=300
        ),
    }
    async with aiohttp.ClientSession() as http:
        yield {alias: Client(http, engines.pair(settings)) for alias, settings in pairs.items()}


@pytest.fixture(scope="module")
def qwen3(clients: dict[str, Client]) -> Client:
    return clients["qwen3"]


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 700) for _ in range(tokens)]


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_greedy_output_is_that_of_transformers(
    name: str, clients: dict[str, Client], references: dict[str, Reference]
) -> None:
    input_ids = prompt(1, 150)
    answer = await clients[name].generate(
        input_ids=input_ids, sampling_params={**GREEDY, "max_new_tokens": 40}
    )
    assert answer["output_ids"] == references[name].continue_greedily(input_ids, 40)
    assert answer["text"] == references[name].tokenizer.decode(answer["output_ids"])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert answer["meta_info"]["prompt_tokens"] == 150
    assert answer["meta_info"]["completion_tokens"] == 40


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_requests_of_unequal_length_do_not_disturb_each_other(
    name: str, clients: dict[str, Client], references: dict[str, Reference]
) -> None:
    sizes = [(7 + 23 * index % 190, 3 + 17 * index % 45) for index in range(16)]
    prompts = [prompt(100 + index, tokens) for index, (tokens, _) in enumerate(sizes)]
    answers = await asyncio.gather(
        *(
            clients[name].generate(
                input_ids=input_ids, sampling_params={**GREEDY, "max_new_tokens": count}
            )
            for input_ids, (_, count) in zip(prompts, sizes, strict=True)
        )
    )
    expected = [
        references[name].continue_greedily(input_ids, count)
        for input_ids, (_, count) in zip(prompts, sizes, strict=True)
    ]
    assert [answer["output_ids"] for answer in answers] == expected


async def test_logprobs_are_those_of_the_network(
    qwen3: Client, references: dict[str, Reference]
) -> None:
    input_ids = prompt(2, 80)
    answer = await qwen3.generate(
        input_ids=input_ids, return_logprob=True, sampling_params={**GREEDY, "max_new_tokens": 20}
    )
    found = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in found] == answer["output_ids"]
    assert {text for *_, text in found} == {None}
    expected = references["qwen3"].logprobs(input_ids, answer["output_ids"])
    assert [logprob for logprob, *_ in found] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_drafts_save_passes_and_change_nothing(
    name: str, clients: dict[str, Client], references: dict[str, Reference]
) -> None:
    input_ids = prompt(8, 60)
    expected = references[name].continue_greedily(input_ids, 80)
    params = {**GREEDY, "max_new_tokens": 80, "custom_params": {"drafts": [expected]}}
    answer = await clients[name].generate(input_ids=input_ids, sampling_params=params)
    meta = answer["meta_info"]
    assert answer["output_ids"] == expected
    assert 0 < meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]
    assert meta["spec_verify_ct"] + meta["spec_num_correct_drafts"] < 80
    streamed = await clients[name].stream(input_ids=input_ids, sampling_params=params)
    assert streamed[-1]["meta_info"]["completion_tokens"] == 80
    assert (
        "spec_verify_ct"
        not in (
            await clients[name].generate(
                input_ids=input_ids, sampling_params={**params, "custom_params": None}
            )
        )["meta_info"]
    )


async def test_text_prompts_are_tokenized_by_the_engine(
    qwen3: Client, references: dict[str, Reference]
) -> None:
    text = "Why does the river meet the ocean?"
    answer = await qwen3.generate(text=text, sampling_params={**GREEDY, "max_new_tokens": 8})
    ids = references["qwen3"].tokenizer.encode(text).ids
    assert answer["meta_info"]["prompt_tokens"] == len(ids)
    assert answer["output_ids"] == references["qwen3"].continue_greedily(ids, 8)


async def test_each_prompt_finds_what_earlier_ones_computed(qwen3: Client) -> None:
    input_ids = prompt(3, 500)
    found = [
        (await qwen3.prefill_only(input_ids[:count]))["cached_tokens"]
        for count in (100, 200, 201, 450, 450)
    ]
    assert found == [0, 100, 200, 201, 449]
    answer = await qwen3.generate(
        input_ids=input_ids, sampling_params={**GREEDY, "max_new_tokens": 4}
    )
    assert answer["meta_info"]["cached_tokens"] == 450


async def test_a_prefix_is_found_only_under_its_own_extra_key(qwen3: Client) -> None:
    found = []
    for key in ("alice", "bob", "alice"):
        answer = await qwen3.generate(
            input_ids=prompt(31, 200),
            sampling_params={**GREEDY, "max_new_tokens": 1},
            extra_key=key,
        )
        found.append(answer["meta_info"]["cached_tokens"])
    assert found == [0, 0, 199]


async def test_a_cached_prefix_does_not_change_the_output(
    qwen3: Client, references: dict[str, Reference]
) -> None:
    input_ids = prompt(4, 300)
    for count in (37, 160, 163, 299):
        await qwen3.prefill_only(input_ids[:count])
    answer = await qwen3.generate(
        input_ids=input_ids, sampling_params={**GREEDY, "max_new_tokens": 30}
    )
    assert answer["meta_info"]["cached_tokens"] == 299
    assert answer["output_ids"] == references["qwen3"].continue_greedily(input_ids, 30)


async def test_the_fake_bootstrap_host_prefills_without_a_partner(qwen3: Client) -> None:
    body = {
        "input_ids": prompt(5, 60),
        "bootstrap_host": "2.2.2.2",
        "bootstrap_room": 0,
        "bootstrap_port": 1,
    }
    status, answer = await qwen3.prefill(body)
    assert status == 200
    assert len(answer["output_ids"]) == 1
    assert (await qwen3.prefill_only(prompt(5, 60)))["cached_tokens"] == 59


async def test_the_prefill_leg_answers_with_the_first_token(qwen3: Client) -> None:
    body = qwen3.body(input_ids=prompt(6, 40), sampling_params={**GREEDY, "max_new_tokens": 5})
    (_, first), (_, answer) = await asyncio.gather(qwen3.prefill(body), qwen3.decode(body))
    assert first["output_ids"] == answer["output_ids"][:1]
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_a_stream_carries_what_the_whole_answer_does(
    name: str, clients: dict[str, Client]
) -> None:
    fields: Json = {
        "input_ids": prompt(7, 50),
        "return_logprob": True,
        "sampling_params": {
            "temperature": 0.9,
            "sampling_seed": 11,
            "max_new_tokens": 30,
            "ignore_eos": True,
        },
    }
    whole, events = await clients[name].generate(**fields), await clients[name].stream(**fields)
    assert len(events) > 1
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    if clients[name].pair.settings.incremental_streaming_output:
        text = "".join(event["text"] for event in events)
        ids = [token for event in events for token in event["output_ids"]]
        logprobs = [
            each for event in events for each in event["meta_info"]["output_token_logprobs"]
        ]
    else:
        text, ids = events[-1]["text"], events[-1]["output_ids"]
        logprobs = events[-1]["meta_info"]["output_token_logprobs"]
        assert all(
            after["text"].startswith(before["text"]) for before, after in itertools.pairwise(events)
        )
    assert (text, ids) == (whole["text"], whole["output_ids"])
    assert logprobs == whole["meta_info"]["output_token_logprobs"]
    assert events[-1]["meta_info"]["completion_tokens"] == 30


async def test_a_seed_fixes_the_output_and_another_changes_it(qwen3: Client) -> None:
    async def sample(seed: int) -> list[int]:
        params = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 20, "sampling_seed": seed}
        return (await qwen3.generate(input_ids=prompt(8, 30), sampling_params=params))["output_ids"]  # type: ignore[no-any-return]

    first, second, again = await asyncio.gather(sample(1), sample(2), sample(1))
    assert first == again
    assert first != second


async def test_a_stop_token_is_among_the_ids_but_not_in_the_text(qwen3: Client) -> None:
    fields: Json = {"input_ids": prompt(9, 30)}
    free = await qwen3.generate(**fields, sampling_params={**GREEDY, "max_new_tokens": 20})
    stop = free["output_ids"][7]
    at = free["output_ids"].index(stop)
    params = {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": [stop]}
    answer = await qwen3.generate(**fields, sampling_params=params)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == free["output_ids"][: at + 1]
    assert free["text"].startswith(answer["text"])
    assert len(answer["text"]) < len(free["text"])


async def test_a_stop_string_ends_the_text_before_it(qwen3: Client) -> None:
    fields: Json = {"input_ids": prompt(9, 30)}
    free = await qwen3.generate(**fields, sampling_params={**GREEDY, "max_new_tokens": 20})
    stop = free["text"].split()[5]
    answer = await qwen3.generate(
        **fields, sampling_params={**GREEDY, "max_new_tokens": 20, "stop": [stop, "@@"]}
    )
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == free["text"][: free["text"].index(stop)]


async def test_more_requests_than_the_batch_holds_all_end(qwen3: Client) -> None:
    answers = await asyncio.gather(
        *(
            qwen3.generate(
                input_ids=prompt(seed, 20), sampling_params={**GREEDY, "max_new_tokens": 30}
            )
            for seed in range(30)
        )
    )
    assert {len(answer["output_ids"]) for answer in answers} == {30}
    await qwen3.until_idle()


async def test_aborting_a_stream_ends_it_and_frees_the_engines(qwen3: Client) -> None:
    params = {**GREEDY, "max_new_tokens": 7000}
    body = qwen3.body(input_ids=prompt(10, 20), rid="long", stream=True, sampling_params=params)
    prefill = asyncio.create_task(qwen3.prefill(body))
    async with qwen3.http.post(f"{qwen3.pair.address.decode_url}/generate", json=body) as response:
        await response.content.readuntil(b"\n\n")
        assert (await qwen3.load(qwen3.pair.address.decode_url))["num_running_reqs"] == 1
        await qwen3.abort(qwen3.pair.address.decode_url, "long")
        events = (await response.text()).split("\n\n")
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 7000
    await prefill
    await qwen3.until_idle()


async def test_a_client_that_leaves_a_stream_aborts_it(qwen3: Client) -> None:
    params = {**GREEDY, "max_new_tokens": 7000}
    body = qwen3.body(input_ids=prompt(11, 20), stream=True, sampling_params=params)
    prefill = asyncio.create_task(qwen3.prefill(body))
    async with qwen3.http.post(f"{qwen3.pair.address.decode_url}/generate", json=body) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await prefill
    await qwen3.until_idle()


async def test_aborting_a_prefill_whose_partner_never_came_frees_it(qwen3: Client) -> None:
    body = qwen3.body(input_ids=prompt(12, 100), rid="lonely")
    leg = asyncio.create_task(qwen3.prefill(body))
    url = qwen3.pair.address.prefill_url
    await qwen3.until(url, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
    await qwen3.abort(url, "lonely")
    status, answer = await leg
    assert status == 500
    assert "Aborted" in answer["message"]
    await qwen3.until_idle()


async def test_aborting_a_decode_that_waits_for_kv_ends_both_legs(qwen3: Client) -> None:
    body = qwen3.body(input_ids=prompt(13, 100), rid="early")
    decode = asyncio.create_task(qwen3.decode(body))
    url = qwen3.pair.address.decode_url
    await qwen3.until(url, lambda load: load["disaggregation"]["decode_transfer_queue_reqs"] == 1)
    await qwen3.abort(url, "early")
    assert (await decode)[0] == 500
    await qwen3.until(url, idle)
    status, answer = await qwen3.prefill(body)
    assert status == 500
    assert "KVTransferError" in answer["message"]
    await qwen3.until_idle()


async def test_abort_all_ends_long_prefills_and_what_waits_behind(qwen3: Client) -> None:
    legs = [
        asyncio.create_task(qwen3.prefill(qwen3.body(input_ids=prompt(20 + each, 6000))))
        for each in range(4)
    ]
    url = qwen3.pair.address.prefill_url
    await qwen3.until(
        url, lambda load: load["num_running_reqs"] == 1 and load["num_waiting_reqs"] == 3
    )
    async with qwen3.http.post(f"{url}/abort_request", json={"abort_all": True}) as response:
        assert response.status == 200
    answers = await asyncio.gather(*legs)
    assert {answer["meta_info"]["finish_reason"]["type"] for _, answer in answers} == {"abort"}
    await qwen3.until_idle()


async def test_unclaimed_kv_is_dropped_after_its_limit(clients: dict[str, Client]) -> None:
    client = clients["impatient"]
    body = client.body(input_ids=prompt(14, 50))
    status, answer = await client.prefill(body)
    assert status == 500
    assert "not handed over within 0.3 s" in answer["message"]
    late_status, late = await client.decode(body)
    assert late_status == 500
    assert "not handed over" in late["message"]
    await client.until_idle()


async def test_a_decode_without_prefill_fails_after_its_limit(clients: dict[str, Client]) -> None:
    status, answer = await clients["impatient"].decode(
        clients["impatient"].body(input_ids=prompt(15, 50))
    )
    assert status == 500
    assert answer["object"] == "error"
    await clients["impatient"].until_idle()


async def test_a_decode_whose_bootstrap_gets_no_answer_fails_at_once(qwen3: Client) -> None:
    status, answer = await qwen3.decode(
        {**qwen3.body(input_ids=prompt(16, 50)), "bootstrap_port": 1}
    )
    assert status == 500
    assert "KVTransferError" in answer["message"] or "Connect" in answer["message"]
    await qwen3.until_idle()


async def test_the_prefix_cache_never_outgrows_its_budget(clients: dict[str, Client]) -> None:
    client = clients["impatient"]
    for seed in range(6):
        await client.prefill_only(prompt(30 + seed, 150))
    assert (await client.prefill_only(prompt(35, 150)))["cached_tokens"] == 149
    assert (await client.prefill_only(prompt(30, 150)))["cached_tokens"] == 0, "400 tokens are kept"


BAD_BODIES: dict[str, tuple[Json, str]] = {
    "nothing to do": ({}, "text, input_ids"),
    "empty prompt": ({"input_ids": []}, "cannot be empty"),
    "token outside the vocabulary": ({"input_ids": [1, 10**6]}, "vocabulary"),
    "prompt over the context": ({"input_ids": [5] * 300}, "longer than the model's context length"),
    "output over the context": (
        {"input_ids": [5] * 250, "sampling_params": {"max_new_tokens": 100}},
        "Requested token count exceeds the model's maximum context length",
    ),
    "negative temperature": (
        {"input_ids": [5], "sampling_params": {"temperature": -1}},
        "temperature",
    ),
    "no room": ({"input_ids": [5], "bootstrap_room": None}, "bootstrap room"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
async def test_bad_requests_get_400_on_both_servers(case: str, clients: dict[str, Client]) -> None:
    client = clients["impatient"]
    fields, words = BAD_BODIES[case]
    for leg in (client.prefill, client.decode):
        status, answer = await leg({**client.body(), **fields})
        assert status == 400
        assert words in answer["error"]["message"]


async def test_a_refused_stream_is_an_error_event(clients: dict[str, Client]) -> None:
    client = clients["impatient"]
    body = client.body(input_ids=[5] * 300, stream=True)
    async with client.http.post(
        f"{client.pair.address.decode_url}/generate", json=body
    ) as response:
        assert response.status == 200
        event, end, _ = (await response.text()).split("\n\n")
    assert "context length" in json.loads(event.removeprefix("data: "))["error"]["message"]
    assert end == "data: [DONE]"


@pytest.mark.parametrize(
    "raw", [b"{", b"[1]", b'{"input_ids": "no"}', b'{"sampling_params": []}', b"\xff"]
)
async def test_bodies_that_are_not_the_schema_get_400(raw: bytes, qwen3: Client) -> None:
    for url in (qwen3.pair.address.prefill_url, qwen3.pair.address.decode_url):
        async with qwen3.http.post(f"{url}/generate", data=raw) as response:
            assert response.status == 400


async def test_unknown_fields_are_ignored(qwen3: Client) -> None:
    answer = await qwen3.generate(
        input_ids=prompt(17, 10),
        user="someone",
        priority=3,
        sampling_params={**GREEDY, "max_new_tokens": 2},
    )
    assert len(answer["output_ids"]) == 2


async def test_both_servers_say_what_they_are(qwen3: Client) -> None:
    for url, mode in (
        (qwen3.pair.address.prefill_url, "prefill"),
        (qwen3.pair.address.decode_url, "decode"),
    ):
        async with qwen3.http.get(f"{url}/health") as response:
            assert response.status == 200
        async with qwen3.http.get(f"{url}/model_info") as response:
            assert (await response.json())["disaggregation_mode"] == mode
        async with qwen3.http.get(f"{url}/server_info") as response:
            info = await response.json()
            assert info["disaggregation_mode"] == mode
            assert info["max_total_num_tokens"] == 65536


SCHEMA: Json = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "deep blue"]},
        "count": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_schema": (json.dumps(SCHEMA), r'\{"color": "(red|deep blue)", "count": [1-9][0-9]\}'),
    "regex": ("[ab]{3}c", "[ab]{3}c"),
    "ebnf": ('root ::= "yes" | "no"', "yes|no"),
}


@pytest.mark.parametrize("kind", GRAMMARS)
async def test_an_output_follows_its_grammar_and_ends_with_it(kind: str, qwen3: Client) -> None:
    text, expected = GRAMMARS[kind]
    answers = await asyncio.gather(
        *(
            qwen3.generate(
                input_ids=prompt(seed, 20 + seed),
                sampling_params={
                    kind: text,
                    "temperature": 1.5,
                    "ignore_eos": True,
                    "max_new_tokens": 60,
                    **drafts,
                },
            )
            for seed, drafts in enumerate(({}, {"custom_params": {"drafts": []}}))
        ),
        qwen3.generate(input_ids=prompt(9, 30), sampling_params={**GREEDY, "max_new_tokens": 30}),
    )
    for answer in answers[:2]:
        assert re.fullmatch(expected, answer["text"]), answer["text"]
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answers[2]["meta_info"]["completion_tokens"] == 30, "others of the batch are free"
    await qwen3.until_idle()


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", "[", "json_schema cannot be used"),
        ("json_schema", '{"not": {}}', "not"),
        ("regex", "(", "unclosed group"),
        ("ebnf", "root ::= nope", "ebnf cannot be used"),
        ("regex", "a" * 300_000, "characters"),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_refused(
    kind: str, text: str, problem: str, qwen3: Client
) -> None:
    status, refusal = await qwen3.decode(qwen3.body(input_ids=[5, 6], sampling_params={kind: text}))
    assert (status, problem in refusal["error"]["message"]) == (400, True), refusal
    await qwen3.until_idle()
