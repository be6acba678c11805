"""Lazy answers over a socket: markers stand for outputs, and never reach a model."""

import asyncio
import json
import re
import zlib
from typing import Any

import aiohttp
import openai
import pytest

from shell_router.api import ApiSettings
from shell_router.core.engine import Generation
from shell_router.core.marks import REASONING_PARSERS
from shell_router.errors import EngineUnreachable
from shell_router.moa.registry import ProgramLimits
from tests.fakes.api_server import Api, ScriptedRelay, api, chat, client, until
from tests.fakes.moa import ScriptedMoa, open_programs
from tests.fakes.scripted_engine import Hold, Script, at_once

CHAT = "/v1/chat/completions"
OUTPUTS = "/v1/agent/outputs/"
KEYS = ApiSettings(keys={"me": "sk-1", "other": "sk-2"})
ME, OTHER = {"Authorization": "Bearer sk-1"}, {"Authorization": "Bearer sk-2"}


def moa_that_echoes(pace: Any = at_once) -> ScriptedMoa:
    """Every answer is made from all of its prompt."""

    def answer(request: Generation) -> Script:
        return Script(f"  says {zlib.crc32(repr(list(request.input_ids)).encode())} of it \n")

    moa = ScriptedMoa(pace=pace)
    for engine in moa.engines.values():
        engine.answer = answer
    return moa


async def content(served: Api, model: str, *messages: tuple[str, str], **fields: object) -> str:
    """What a chat completion says."""
    said = [{"role": role, "content": text} for role, text in messages]
    status, body = await served.post(CHAT, {"model": model, "messages": said, **fields})
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


async def tree(served: Api, leaves: dict[str, object], root: dict[str, object]) -> str:
    """Three leaves, two that read them, and a root that reads these in all roles."""
    models = ("small", "medium", "other")
    drafts = [
        await content(served, model, ("system", "Draft."), ("user", "Why?"), **leaves)
        for model in models
    ]
    middle = [
        await content(
            served,
            model,
            ("system", "Be brief."),
            ("user", f"A: {drafts[0]}\n{drafts[1]}B"),
            **leaves,
        )
        for model in ("large", "small")
    ]
    system, last = (
        ("system", f"Known:{middle[0]}"),
        ("user", f"{middle[1]}, {drafts[2]}{drafts[0]}"),
    )
    return await content(
        served, "large", ("system", "Sum up."), system, ("assistant", drafts[0]), last, **root
    )


async def test_a_tree_of_lazy_answers_ends_as_without() -> None:
    async with api(moa_that_echoes()) as served:
        plain = await tree(served, {}, {})
        asked = [sorted(served.moa.prompts(alias)) for alias in served.moa.engines]
        for root in ({}, {"program": "p"}):
            for engine in served.moa.engines.values():
                engine.generated.clear()
            assert await tree(served, {"program": "p", "lazy": True}, root) == plain
            assert [sorted(served.moa.prompts(alias)) for alias in served.moa.engines] == asked


async def test_a_lazy_answer_comes_before_its_agent_has_ended_and_is_a_whole_completion() -> None:
    hold = Hold(first=0)
    async with api(moa_that_echoes(hold.pace)) as served, client(served, "none") as ai:
        headers = {"x-shell-router-program": "p", "x-shell-router-lazy": "true"}
        messages: Any = [{"role": "user", "content": "Why?"}]
        lazy = await ai.chat.completions.create(
            model="small", messages=messages, extra_headers=headers
        )
        assert (
            lazy.choices[0].finish_reason == "stop" and lazy.usage and lazy.usage.total_tokens == 0
        )
        marker = lazy.choices[0].message.content or ""
        streamed = await ai.chat.completions.create(
            model="small", messages=messages, stream=True, extra_body={"program": "p", "lazy": True}
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in streamed]
        assert "".join(parts).startswith("[[lazyanswer:") and "".join(parts) != marker
        assert await served.get(OUTPUTS + f"{marker}?wait_s=0") == (
            202,
            {
                "object": "agent.output",
                "program": "p",
                "agent": marker[13:-2],
                "state": "running",
                "text": None,
            },
        )
        assert (await served.get(OUTPUTS + f"{marker}?wait_s=-1"))[0] == 400
        root = asyncio.ensure_future(content(served, "large", ("user", f"So: {marker}")))
        hold.release()
        status, body = await served.get(OUTPUTS + marker)
        assert status == 200 and body["state"] == "finished" and body["text"].startswith("  says ")
        assert served.moa.prompts("large") == [] or await root
        await root
        assert served.moa.prompts("large") == [f"<user>So: {body['text']}<assistant>"]


async def test_a_reader_streams_its_own_answer_with_its_agents() -> None:
    async with api(moa_that_echoes()) as served, client(served, "none") as ai:
        marker = await content(served, "small", ("user", "Why?"), program="p", lazy=True)
        whole = await content(served, "large", ("user", marker))
        messages: Any = [{"role": "user", "content": marker}]
        for usage in (True, False):
            stream = await ai.chat.completions.create(
                model="large",
                messages=messages,
                stream=True,
                stream_options={"include_usage": usage},
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
            assert (
                any(not chunk.choices for chunk in chunks) is usage
            )  # Together's clients index every chunk's choices


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_and_messages_are_lazy_too_and_read_markers(stream: bool) -> None:
    async with api(moa_that_echoes()) as served:

        async def said(model: str, text: str, path: str, **fields: object) -> str:
            inputs: dict[str, object] = {
                "max_tokens": 99,
                "messages": [{"role": "user", "content": text}],
            }
            if path == "/v1/responses":
                inputs = {"input": text}
            async with served.stream(
                {"model": model, "stream": stream, **inputs, **fields}, path
            ) as answer:
                whole = await answer.text()
                assert answer.status == 200 and "x-ignored-fields" not in answer.headers, whole
            found = re.search(r"\[\[lazyanswer:\w+]]|  says \d+ of it", whole)
            assert found, whole
            return found[0]

        for path in ("/v1/responses", "/v1/messages"):
            marker = await said("small", "Why?", path, program=path[4:], lazy=True)
            assert (await said("large", marker, path, program=path[4:])).startswith("  says")
        assert all(prompt.startswith("<user>  says ") for prompt in served.moa.prompts("large"))


async def test_what_a_request_says_of_thinking_holds_for_lazy_answers_and_their_readers_too() -> (
    None
):
    moa = ScriptedMoa(reasoning=REASONING_PARSERS["qwen3"])
    for engine in moa.engines.values():
        engine.answer = lambda _: Script("<think>hm</think> Seven.", piece_words=1)
    options: dict[str, object] = {
        "chat_template_kwargs": {"style": "x"},
        "max_thinking_tokens": 3,
        "max_tokens": 9,
    }
    async with api(moa) as served:
        marker = await content(served, "small", ("user", "Why?"), program="p", lazy=True, **options)
        assert (await served.get(OUTPUTS + marker))[1]["text"] == "Seven."
        await content(served, "large", ("user", f"So {marker}"), **options)
        assert moa.prompts("small")[0] == "<style=x><user>Why?<assistant>"
        assert moa.prompts("large")[0] == "<style=x><user>So Seven.<assistant>"
        assert [
            moa.engines[alias].generated[0].sampling["max_new_tokens"]
            for alias in ("small", "large")
        ] == [3, 3]
        moa.engines["large"].answer = lambda _: Script("<think>on and on", reason="length")
        for asked in ("So Seven.", f"So {marker}"):
            status, body = await served.post(CHAT, chat(asked, model="large"))
            message = {"role": "assistant", "content": "", "reasoning_content": "on and on"}
            assert status == 200 and body["choices"][0]["message"] == message
            assert body["choices"][0]["finish_reason"] == "length"
    async with api() as served:
        lazy = chat(model="small", program="p", lazy=True, max_thinking_tokens=3)
        status, body = await served.post(CHAT, lazy)
        assert status == 400 and "reasoning_parser" in body["error"]["message"]


async def test_a_topology_reads_lazy_answers_and_is_none() -> None:
    async with api(moa_that_echoes()) as served:
        first = await content(served, "small", ("user", "Why?"))
        marker = await content(served, "small", ("user", "Why?"), program="p", lazy=True)
        assert await content(served, "duo", ("user", marker)) == await content(
            served, "duo", ("user", first)
        )
        status, body = await served.post(CHAT, chat(program="p", lazy=True))
        assert (status, body["error"]["param"]) == (400, "lazy")


TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


async def test_tools_and_thinking_never_go_together_with_markers() -> None:
    def called(arguments: str, question: str = "Why?") -> list[dict[str, object]]:
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "look_up", "arguments": arguments},
        }
        result: dict[str, object] = {"role": "tool", "tool_call_id": "c", "content": "Rain."}
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            result,
        ]

    moa = ScriptedMoa(call_mark="<tool_call>")
    async with api(moa) as served:
        marker = await content(served, "small", ("user", "Why?"), program="p", lazy=True)
        await served.get(OUTPUTS + marker)
        thought = [
            {"role": "assistant", "content": "", "reasoning_content": marker},
            {"role": "user", "content": "So?"},
        ]
        thought_before = [
            {"role": "user", "content": f"So {marker}"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "It said so."},
            {"role": "user", "content": "Why?"},
        ]
        for engine in moa.engines.values():
            engine.generated.clear()
        for model in ("large", "duo"):
            for body, param in (
                (chat("Why?", lazy=True, program="p", tools=TOOLS), "lazy"),
                ({"messages": called("{}"), "lazy": True, "program": "p"}, "lazy"),
                (chat(f"So {marker}", tools=TOOLS), "messages"),
                (
                    chat(f"So {marker}", tools=TOOLS, tool_choice="required", stream=True),
                    "messages",
                ),
                ({"messages": called("{}", f"So {marker}")}, "messages"),
                ({"messages": called(json.dumps({"text": marker}))}, "messages"),
                ({"messages": thought}, "messages"),
                ({"messages": thought_before}, "messages"),
                ({"messages": thought_before[1:], "lazy": True, "program": "p"}, "lazy"),
            ):
                status, answer = await served.post(CHAT, {**body, "model": model})
                assert (status, answer["error"]["param"]) == (400, param), answer
        assert not any(engine.generated for engine in moa.engines.values())


GOOD = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    "altered",
    [
        "[[lazyanswer:{id}\\]]",
        "[[lazyanswer:" + GOOD + "]]",
        "[[lazyanswer:]]",
        "[[lazyanswer:{id}",
        "[lazyanswer:{id}]",
        "lazyanswer:{id}",
        "[[lazyanswer:{id}]",
        "[[lazyanswer:{cut}]]",
        "[[lazyanswer:{id}0]]",
        "[[lazyanswer: {id}]]",
        "[[lazyanswer:{upper}]]",
        "[[LAZYANSWER:{id}]]",
        "[[Lazyanswer:{id}]]",
        "%5B%5Blazyanswer%3A{id}%5D%5D",
        "&#91;&#91;lazyanswer:{id}&#93;&#93;",
        "{marker} and [[lazyanswer:x]]",
        "[[lazyanswer:{id}]{id}]]",
        "[[lazyanswer:{id}\n]]",
        "[[lazyanswer:{foreign}]]",
        "[[lazyanswer:{others}]]",
        "[[lazyanswer",
        "[[ lazyanswer : {id} ]]",
        "\\u005b\\u005blazyanswer\\u003a{cut}",
        "%5B%5Blazyanswer",
        "lazyanswer&#58;",
        "lazyanswer-{id}",
        "_lazyanswer_{id}_",
        "LAZYANSWER{upper}",
    ],
)
async def test_what_is_no_marker_of_the_program_is_refused_and_nothing_runs(altered: str) -> None:
    async with api(moa_that_echoes(), KEYS) as served:
        lazy = {**chat(model="small"), "lazy": True}
        ids = []
        for program, key in (("p", ME), ("p", OTHER), ("q", ME)):
            body = (await served.post(CHAT, {**lazy, "program": program}, **key))[1]
            ids.append(body["choices"][0]["message"]["content"][13:-2])
            await served.get(OUTPUTS + ids[-1], **key)
        marker = f"[[lazyanswer:{ids[0]}]]"
        known = {"marker": marker, "id": ids[0], "cut": ids[0][:-1], "foreign": ids[1]}
        text = altered.format(**known, upper="A" + ids[0].upper(), others=ids[2])
        for engine in served.moa.engines.values():
            engine.generated.clear()
        for fields in (
            {"program": "p"},
            {"program": "p", "lazy": True},
            {"program": "p", "stream": True},
        ):
            for model in ("large", "duo"):
                body = chat(f"Judge {text}", model=model, **fields)
                status, answer = await served.post(CHAT, body, **ME)
                assert (status, answer["error"]["code"]) == (400, "invalid_field")
        agent = {"program": "p", "agent": "a", "model": "small"}
        for prompt in (
            {"prompt": text},
            {"prompt": ["x", {"text": text}]},
            {"messages": chat(text)["messages"]},
        ):
            assert (await served.post("/v1/agent/requests", {**agent, **prompt}, **ME))[0] == 400
        assert (await served.post("/generate", {"text": text}, **ME))[0] == 400
        assert not served.moa.running
        assert not any(
            engine.generated or engine.prefilled for engine in served.moa.engines.values()
        )


@pytest.mark.parametrize(
    "word",
    [
        "What is a lazyanswer?",
        '{"LazyAnswer": "Lazyanswer"}',
        "`lazyanswer`: a word",
        "LAZYANSWERS",
    ],
)
async def test_a_text_with_the_markers_word_alone_has_none(word: str) -> None:
    relay = ScriptedRelay()
    async with api(moa_that_echoes(), relays={"small": relay}) as served:
        for fields in ({}, {"program": "p"}, {"program": "p", "lazy": True}):
            assert (await served.post(CHAT, chat(word, model="large", **fields)))[0] == 200
        agent = {"program": "p", "agent": "a", "model": "small", "prompt": word}
        assert (await served.post("/v1/agent/requests", agent))[0] == 200
        assert (await served.post("/generate", {"text": word}))[0] == 200
        first = await content(served, "large", ("user", word), program="q", lazy=True)
        assert "says" in await content(served, "large", ("user", f"{word} {first}"))


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"lazy": True}, {}, "program"),
        ({"lazy": "yes", "program": "p"}, {}, "lazy"),
        ({"program": "a/b"}, {}, "program"),
        ({"program": "p"}, {"x-shell-router-program": "q"}, "program"),
        ({}, {"x-shell-router-program": "a b"}, "x-shell-router-program"),
        ({"program": "p"}, {"x-shell-router-lazy": "1"}, "x-shell-router-lazy"),
    ],
)
async def test_wishes_that_cannot_be_met_name_their_field(
    fields: dict[str, object], headers: dict[str, str], param: str
) -> None:
    async with api(moa_that_echoes()) as served:
        status, body = await served.post(CHAT, chat(model="small", **fields), **headers)
        assert (status, body["error"]["param"]) == (400, param)


async def test_two_lazy_chains_of_one_program_race() -> None:
    async def chain(first: str, **fields: object) -> str:
        said = await content(served, "small", ("user", first), **fields)
        said = await content(served, "medium", ("user", f"{first}: {said}"), **fields)
        return await content(served, "large", ("user", f"End {said}"))

    async with api(moa_that_echoes()) as served:
        plain = [await chain(first) for first in ("one", "two")]
        lazy = await asyncio.gather(
            *(chain(first, program="p", lazy=True) for first in ("one", "two"))
        )
        assert lazy == plain


async def test_markers_of_an_abandoned_program_expire_and_its_outputs_go() -> None:
    now_s, moa = 0.0, moa_that_echoes()
    moa.programs = open_programs(
        moa.models, moa.cache, clock=lambda: now_s, limits=ProgramLimits(ttl_s=10.0)
    )
    async with api(moa) as served:
        marker = await content(served, "small", ("user", "Why?"), program="p", lazy=True)
        assert (await served.get(OUTPUTS + marker))[0] == 200
        now_s = 10.0
        assert (await served.get(OUTPUTS + marker))[0] == 404
        status, body = await served.post(CHAT, chat(f"Judge {marker}", model="large", program="p"))
        assert status == 400 and "expired" in body["error"]["message"]
        await content(served, "small", ("user", "Why?"), program="q", lazy=True)
        assert len(moa.cache) == 1


async def test_deleting_a_program_ends_its_lazy_answers_and_their_readers() -> None:
    hold = Hold(first=0)
    async with api(moa_that_echoes(hold.pace)) as served:
        marker = await content(served, "small", ("user", "Why?"), program="p", lazy=True)
        reading = asyncio.ensure_future(served.post(CHAT, chat(f"Judge {marker}", model="large")))
        await hold.until_waiting()
        async with served.client.delete(f"{served.url}/v1/agent/requests/p") as response:
            assert response.status == 200
        assert (await reading)[0] in (400, 502)
        assert (await served.get(OUTPUTS + marker))[0] == 404
        await until(lambda: not served.moa.running)
        assert len(served.moa.cache) == 0


async def test_what_runs_lazily_counts_as_running_and_a_stopping_router_cuts_it() -> None:
    hold = Hold(first=0)
    moa = moa_that_echoes(hold.pace)
    before = asyncio.all_tasks()
    async with api(moa, ApiSettings(max_running=2), drain_s=0.05) as served:
        for _ in range(2):
            await content(served, "small", ("user", "Why?"), program="p", lazy=True)
        assert (await served.post(CHAT, chat(model="small")))[0] == 429
    await until(lambda: not moa.running and asyncio.all_tasks() == before)


@pytest.mark.parametrize("several", [False, True])
async def test_reads_that_wait_leave_connections_to_probes_and_to_other_tenants(
    several: bool,
) -> None:
    hold = Hold(first=0)
    limits = {"max_agents_per_tenant": 3} if several else {}
    settings = ApiSettings(keys=KEYS.keys, max_connections=40, **limits)
    most = 3 if several else 20
    async with api(moa_that_echoes(hold.pace), settings) as served:
        lazy = chat(model="small", program="p", lazy=True)
        markers = {}
        for tenant, key in (("me", ME), ("other", OTHER)):
            answer = (await served.post(CHAT, lazy, **key))[1]
            markers[tenant] = answer["choices"][0]["message"]["content"]
        path = f"{OUTPUTS}{markers['me']}?wait_s=60"
        reads = [asyncio.ensure_future(served.get(path, **ME)) for _ in range(30)]
        await until(lambda: sum(read.done() for read in reads) == 30 - most)
        refused = [read.result() for read in reads if read.done()]
        assert {status for status, _ in refused} == {429}
        assert "reads wait for outputs" in refused[0][1]["error"]["message"]
        async with aiohttp.ClientSession() as fresh:
            for probe in ("/health", "/ready"):
                async with fresh.get(served.url + probe) as response:
                    assert response.status == 200
        assert (await served.get(f"{OUTPUTS}{markers['me']}?wait_s=0", **ME))[0] == 202
        other = asyncio.ensure_future(served.get(f"{OUTPUTS}{markers['other']}", **OTHER))
        if not several:
            assert (await other)[0] == 429
        hold.release()
        assert {(await read)[0] for read in reads} == {200, 429}
        if several:
            assert (await other)[0] == 200
        assert (await served.get(path, **ME))[0] == 200


async def test_lazy_agents_count_as_those_of_their_tenant_until_they_end() -> None:
    hold = Hold(first=0)
    several = ApiSettings(keys=KEYS.keys, max_agents_per_tenant=2)
    async with api(moa_that_echoes(hold.pace), several) as served:
        lazy = chat(model="small", program="p", lazy=True)
        assert [(await served.post(CHAT, lazy, **ME))[0] for _ in range(3)] == [200, 200, 429]
        assert (await served.post(CHAT, lazy, **OTHER))[0] == 200
        hold.release()
        await until(lambda: not served.moa.running)
        assert (await served.post(CHAT, chat(model="small"), **ME))[0] == 200


async def test_a_lazy_answer_that_cannot_begin_is_refused_and_one_that_fails_fails_its_readers() -> (
    None
):
    moa = moa_that_echoes()
    async with api(moa) as served, client(served, "none") as ai:
        messages: Any = [{"role": "user", "content": "Why?"}]
        lazy = {"program": "p", "lazy": True}
        with pytest.raises(openai.NotFoundError, match="missing"):
            await ai.chat.completions.create(model="missing", messages=messages, extra_body=lazy)
        with pytest.raises(openai.BadRequestError, match="4096"):
            await ai.chat.completions.create(
                model="small", messages=messages, max_tokens=5000, extra_body=lazy
            )
        moa.engines["small"].answer = lambda _: Script(
            "x", error=EngineUnreachable("The engine is gone.")
        )
        marker = await content(served, "small", ("user", "Why?"), **lazy)
        for model in ("large", "duo"):
            status, body = await served.post(CHAT, chat(f"Judge {marker}", model=model))
            assert status == 502 and "engine is gone" in body["error"]["message"]
        assert (await served.get(OUTPUTS + marker))[0] == 502
