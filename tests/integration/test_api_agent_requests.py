"""Agent requests over a socket."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from shell_router.api import ApiSettings
from shell_router.core.marks import ReasoningMarks
from shell_router.errors import EngineStalled
from tests.fakes.api_server import api, chat, until
from tests.fakes.moa import ScriptedMoa, WordTokenizer
from tests.fakes.scripted_engine import Hold, Script

ONE = {"program": "p", "agent": "one", "model": "small", "prompt": "Say one."}
TWO = {
    "program": "p",
    "agent": "two",
    "model": "large",
    "prompt": ["It said: ", {"output_of": "one"}, " Judge."],
}
PATH = "/v1/agent/requests"


async def test_an_agent_reads_anothers_output_in_either_order() -> None:
    async with api() as served:
        later = asyncio.ensure_future(served.post(PATH, TWO))
        assert (await served.post(PATH, ONE))[0] == 200
        status, body = await later
        assert (status == 200 and body["text"].startswith("two")) or body["text"]
        (request,) = served.moa.engines["large"].generated
        prompt = served.moa.tokenizers["large"].decode(request.input_ids)
        one = served.moa.engines["small"].generated[0]
        assert (
            prompt.startswith("It said: ") and prompt.endswith(" Judge.") and one.rid in prompt
        ) or prompt


async def test_a_stream_has_typed_events_and_ends_with_the_whole_answer() -> None:
    async with api() as served:
        await served.post(PATH, ONE)
        async with served.stream({**TWO, "stream": True}, PATH) as response:
            frames = (await response.text()).split("\n\n")
        events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
        types = [event["type"] for event in events]
        assert types[0] == "started" and types[-1] == "finished" and frames[-2] == "data: [DONE]"
        tokens = [event for event in events if event["type"] == "token"]
        assert "".join(event["text"] for event in tokens) == events[-1]["text"]
        assert (
            sum(len(event["ids"]) for event in tokens) == events[-1]["usage"]["completion_tokens"]
        )


async def test_a_program_can_be_looked_at_and_deleted() -> None:
    async with api() as served:
        await served.post(PATH, ONE)
        status, body = await served.get(PATH + "/p")
        assert (
            status == 200
            and body["agents"]["one"]["state"] == "finished"
            and body["agents"]["one"]["output"]
        )
        async with served.client.delete(f"{served.url}{PATH}/p") as response:
            assert (await response.json())["deleted"]
        assert (await served.get(PATH + "/p"))[0] == 404


async def test_deleting_a_program_ends_what_runs_with_an_error() -> None:
    hold = Hold(first=0)
    async with api(ScriptedMoa(pace=hold.pace)) as served:
        running = asyncio.ensure_future(served.post(PATH, ONE))
        await hold.until_waiting()
        async with served.client.delete(f"{served.url}{PATH}/p") as response:
            assert response.status == 200
        status, body = await running
        assert (status, body["error"]["code"]) == (502, "agent_failed")
        assert not served.moa.running


async def test_what_cannot_run_is_refused() -> None:
    async with api() as served:
        await served.post(PATH, ONE)
        for body, wanted in (
            ({**ONE, "prompt": "Say two."}, (409, "duplicate_agent")),
            ({**ONE, "agent": "x", "model": "missing"}, (404, "model_not_found")),
            ({**ONE, "agent": "x", "prompt": [{"output_of": "x"}]}, (400, "invalid_request")),
            ({**ONE, "agent": "x", "prompt": []}, (400, "invalid_field")),
        ):
            for stream in (False, True):
                status, answer = await served.post(PATH, {**body, "stream": stream})
                assert (status, answer["error"]["code"]) == wanted
        assert (await served.get(PATH + "/unknown"))[0] == 404


async def test_a_precursor_that_never_comes_ends_the_wait_and_the_stream() -> None:
    async with api() as served:
        status, body = await served.post(PATH, {**TWO, "wait_s": 0.02})
        assert (status, body["error"]["code"]) == (504, "precursor_timeout")
        async with served.stream(
            {**TWO, "program": "q", "wait_s": 0.02, "stream": True}, PATH
        ) as response:
            last = (await response.text()).split("\n\n")[-2]
        error = json.loads(last.removeprefix("data: "))
        assert (error["type"], error["error"]["code"]) == ("error", "precursor_timeout")


async def test_programs_of_two_tenants_do_not_meet() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1", "other": "sk-2"})) as served:
        await served.post(PATH, ONE, Authorization="Bearer sk-1")
        assert (await served.get(PATH + "/p", Authorization="Bearer sk-2"))[0] == 404
        assert (await served.post(PATH, ONE, Authorization="Bearer sk-2"))[0] == 200


async def test_an_output_written_elsewhere_is_read_while_it_arrives() -> None:
    arriving = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield "Größ".encode()[:3]
        yield "Größ".encode()[3:]
        await arriving.wait()
        yield b"e."

    async with api() as served:
        put = f"{served.url}/v1/agent/outputs/p/one"
        sent = asyncio.ensure_future(served.client.put(put, data=pieces()))
        reader = asyncio.ensure_future(served.post(PATH, TWO))
        async with asyncio.timeout(10):
            while (await served.get(PATH + "/p"))[1].get("agents", {}).get("one", {}).get(
                "state"
            ) != "running":
                pass
        arriving.set()
        async with await sent as response:
            assert (response.status, (await response.json())["text"]) == (201, "Größe.")
        assert (await reader)[0] == 200
        assert served.moa.prompts("large") == ["It said: Größe. Judge."]
        async with served.client.put(put, data=b"Again.") as response:
            assert response.status == 409


async def test_an_output_that_is_no_text_or_too_long_is_refused_and_its_id_is_free_again() -> None:
    async with api(settings=ApiSettings(max_body_bytes=8)) as served:
        put = f"{served.url}/v1/agent/outputs/p/one"
        for data, status in ((b"\xff", 400), (b"123456789", 413), (b"12345678", 201)):
            async with served.client.put(put, data=data) as response:
                assert response.status == status
        async with served.client.put(f"{served.url}/v1/agent/outputs/p/o,e", data=b"x") as response:
            assert response.status == 400


class MeasuringTokenizer(WordTokenizer):
    """Keeps the length of the longest text that it was given."""

    longest = 0

    def encode(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        return super().encode(text)

    def encode_stable(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        return super().encode_stable(text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["prompt", "messages", "topology", "lazy chat", "lazy topology"])
async def test_outputs_that_are_together_too_long_are_refused_before_the_prompt_is_made(
    way: str, stream: bool
) -> None:
    moa = ScriptedMoa({"one": "word " * 300}, tokenizer=MeasuringTokenizer, context_length=512)
    async with api(moa) as served:
        put = f"{served.url}/v1/agent/outputs/p/one"
        async with served.client.put(put, data="word " * 1000) as response:
            assert response.status == 201
        read = [{"output_of": "one"}] * 20
        bodies: dict[str, dict[str, object]] = {
            "prompt": {"model": "small", "prompt": read},
            "messages": {"model": "small", **said(*read)},
            "topology": {"model": "duo", **said(*read)},
        }
        if way in bodies:
            asked = PATH, {"program": "p", "agent": "two", **bodies[way]}
        else:
            for engine in moa.engines.values():
                engine.answer = lambda request: Script("word " * 300)
            lazy = chat(model="small", program="l", lazy=True)
            _, answer = await served.post("/v1/chat/completions", lazy)
            marker = answer["choices"][0]["message"]["content"]
            model = "small" if way == "lazy chat" else "duo"
            asked = "/v1/chat/completions", chat(marker * 20, model=model)
        path, body = asked
        async with served.stream({**body, "stream": stream}, path) as response:
            text = await response.text()
        assert "context_length_exceeded" in text
        assert "a context of 512 tokens holds at most 16 for each" in text
        assert all(
            isinstance(tokenizer, MeasuringTokenizer) and tokenizer.longest <= 16 * 512
            for tokenizer in moa.tokenizers.values()
        )


async def test_a_retry_in_a_stream_gets_the_answer() -> None:
    async with api() as served:
        _, first = await served.post(PATH, ONE)
        async with served.stream({**ONE, "stream": True}, PATH) as response:
            frames = (await response.text()).split("\n\n")
        assert json.loads(frames[-3].removeprefix("data: "))["text"] == first["text"]


def said(*content: object, **fields: object) -> dict[str, object]:
    return {"program": "p", "messages": [{"role": "user", "content": list(content)}], **fields}


GRAPH = said("It said: ", {"output_of": "one"}, " Judge.", agent="two", model="duo")
READER = said(
    "Sum up: ", {"output_of": "two"}, agent="three", model="medium", prefill={"chunk_tokens": 1}
)
ROOT_SAYS = "root thinks and root speaks and then root is done"


async def test_a_topology_is_an_agent_that_reads_others_and_is_read_while_it_writes() -> None:
    hold = Hold(first=2)

    async def pace(rid: str, piece: int) -> None:
        if rid.endswith(".root"):
            await hold.pace(rid, piece)

    async with api(ScriptedMoa({"root": Script(ROOT_SAYS, piece_words=3)}, pace=pace)) as served:
        reader = asyncio.ensure_future(served.post(PATH, READER))
        asked = asyncio.ensure_future(served.post(PATH, GRAPH))
        status, one = await served.post(PATH, ONE)
        assert status == 200
        await hold.until_waiting()
        assert (await served.get(PATH + "/p"))[1]["agents"]["two"]["state"] == "running"
        engine, tokenizer = served.moa.engines["medium"], served.moa.tokenizers["medium"]
        await until(lambda: bool(engine.prefilled))  # and the root has not ended
        assert tokenizer.decode(engine.prefilled[0].input_ids).startswith(
            "<user>Sum up: root thinks"
        )
        hold.release()
        status, body = await asked
        assert (status, body["agent"], body["model"], body["text"]) == (
            200,
            "two",
            "duo",
            ROOT_SAYS,
        )
        assert body["usage"]["completion_tokens"] == 30  # of all its agents
        assert served.moa.prompt_of("left") == f"<user>It said: {one['text']} Judge.<assistant>"
        assert (await reader)[0] == 200
        assert f"<user>Sum up: {ROOT_SAYS}<assistant>" in served.moa.prompts("medium")
        count = len(served.moa.engines["large"].generated)
        assert (await served.post(PATH, GRAPH))[1]["text"] == ROOT_SAYS
        assert len(served.moa.engines["large"].generated) == count
        _, program = await served.get(PATH + "/p")
        assert program["agents"]["two"] == {"state": "finished", "output": ROOT_SAYS}


async def test_the_stream_of_a_topology_as_an_agent_holds_its_answer_alone() -> None:
    async with api() as served:
        async with served.stream(
            {**said("Why?", agent="a", model="duo"), "stream": True}, PATH
        ) as response:
            frames = (await response.text()).split("\n\n")
        events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
        assert {event["agent"] for event in events} == {"a"}
        assert "".join(event["text"] for event in events if event["type"] == "token") == ROOT_SAYS
        assert (events[-1]["type"], events[-1]["text"]) == ("finished", ROOT_SAYS)


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"messages": None, "prompt": "Why?"}, {}, "prompt"),
        ({"prefill": {"chunk_tokens": 8}}, {}, "prefill"),
        (
            {
                "messages": [
                    {"role": "user", "content": "Why?"},
                    {"role": "assistant", "content": "So."},
                ]
            },
            {},
            "messages",
        ),
        ({}, {"Idempotency-Key": "k"}, "Idempotency-Key"),
    ],
)
async def test_what_a_topology_cannot_be_asked_as_an_agent_names_its_field(
    fields: dict[str, object], headers: dict[str, str], param: str
) -> None:
    async with api() as served:
        status, body = await served.post(
            PATH, {**said("Why?", agent="a", model="duo"), **fields}, **headers
        )
        assert (status, body["error"]["param"]) == (400, param), body
        assert not any(engine.generated for engine in served.moa.engines.values())


async def test_a_topology_that_fails_as_an_agent_fails_its_readers_and_may_be_sent_again() -> None:
    failing = {
        "root": Script("a b c", error=EngineStalled("nothing came for 60 s."), error_after=1)
    }
    async with api(ScriptedMoa(failing)) as served:
        graph = said("Why?", agent="two", model="duo")
        reader = asyncio.ensure_future(served.post(PATH, READER))
        assert (await served.post(PATH, graph))[0] in (502, 504)
        status, body = await reader
        assert status == 502 and "nothing came" in body["error"]["message"]
        by_name = served.moa.engines["large"].answer
        served.moa.engines["large"].answer = lambda _: Script(ROOT_SAYS)
        assert (await served.post(PATH, graph))[1]["text"] == ROOT_SAYS
        served.moa.engines["large"].answer = by_name
        status, body = await served.post(PATH, {**GRAPH, "program": "q", "wait_s": 0.02})
        assert (status, body["error"]["code"]) == (504, "precursor_timeout")
        assert not served.moa.running
    thinking = ScriptedMoa(
        {"root": Script("<think>on and on", reason="length")}, reasoning=ReasoningMarks()
    )
    async with api(thinking) as served:
        status, body = await served.post(PATH, said("Why?", agent="a", model="duo"))
        assert status == 502 and "ended inside its thinking" in body["error"]["message"]


@pytest.mark.parametrize(("model", "first_engine"), [("large", "large"), ("duo", "medium")])
async def test_a_reader_leaves_out_what_failed_if_it_asks_for_that_and_reads_what_is_empty(
    model: str, first_engine: str
) -> None:
    moa = ScriptedMoa()
    small = moa.engines["small"]
    by_agent = small.answer
    small.answer = lambda _: Script("half", error=EngineStalled("gone"))
    async with api(moa) as served:
        put = f"{served.url}/v1/agent/outputs/p/silent"
        async with served.client.put(put, data=b"") as response:
            assert response.status == 201
        assert (await served.post(PATH, ONE))[0] in (502, 504)
        small.answer = by_agent

        async def read(agent: str, *precursors: str, **fields: str) -> tuple[int, str]:
            outputs = [{"output_of": precursor} for precursor in precursors]
            asked = said("Heard: ", *outputs, agent=agent, model=model, **fields)
            status, body = await served.post(PATH, asked)
            return status, str(body)

        drop = {"on_precursor_failure": "drop"}
        assert (await read("a", "one", "silent"))[0] == 502
        assert (await read("b", "one", "silent", on_precursor_failure="fail"))[0] == 502
        assert not moa.prompts(first_engine)
        assert (await read("c", "one", "silent", **drop))[0] == 200
        assert (await read("d", "silent"))[0] == 200
        assert moa.prompts(first_engine) == ["<user>Heard: <assistant>"] * 2
        status, body = await read("e", "one", **drop)
        assert status == 502 and "no precursor left" in body


def propose(agent: str, **fields: object) -> dict[str, object]:
    return said("Why?", agent=agent, model="small", confidence=True, **fields)


def sum_up(*precursors: str, **fields: object) -> dict[str, object]:
    outputs = [{"output_of": precursor} for precursor in precursors]
    return said("Heard: ", *outputs, agent="reader", model="large", **fields)


async def test_an_early_exit_leaves_the_last_precursor_out_and_aborts_it() -> None:
    async def pace(rid: str, piece: int) -> None:
        if rid.startswith("late.") and piece == 1:
            await hold.pace(rid, piece)

    hold = Hold()
    moa = ScriptedMoa(pace=pace)
    moa.engines["small"].answer = lambda _: Script("It is so. Answer: 7", piece_words=3)
    async with api(moa) as served:
        late = asyncio.ensure_future(served.post(PATH, propose("late")))
        await hold.until_waiting()
        exits = {"policy": "threshold", "threshold": 0.5, "tau": 1.0}
        read = sum_up("a", "late", "b", early_exit=exits)
        reading = asyncio.ensure_future(served.post(PATH, read))
        for agent in ("a", "b"):
            assert (await served.post(PATH, propose(agent)))[0] == 200
        assert (await reading)[0] == 200
        text = "It is so. Answer: 7"
        assert moa.prompts("large") == [f"<user>Heard: {text}{text}<assistant>"]
        status, cut = await late
        assert (status, cut["text"], cut["finish_reason"]) == (200, "It is so.", "abort")
        assert "early exit" in cut["warnings"][0]
        assert cut["usage"]["completion_tokens"] == 4
        _, program = await served.get(PATH + "/p")
        assert program["agents"]["late"] == {"state": "cancelled", "output": "It is so."}
        await until(lambda: not moa.running)
        assert [rid.partition(".")[0] for rid in moa.engines["small"].aborted] == ["late"]
        _, traces = await served.get("/v1/traces")
        by_agent = {trace["agent"]: trace["id"] for trace in traces["data"]}
        _, trace = await served.get(f"/v1/traces/{by_agent['reader']}")
        assert trace["exits"][0]["aborted"] == ["late"]
        _, trace = await served.get(f"/v1/traces/{by_agent['late']}")
        assert (trace["state"], trace["agents"]["late"]["state"]) == ("finished", "early_exit")
        async with served.client.get(served.url + "/metrics") as response:
            metrics = await response.text()
        assert 'agents_stopped_total{model="small",why="early_exit"} 1.0' in metrics
        hold.release()
        assert (await served.post(PATH, propose("late")))[1]["text"] == text


@pytest.mark.parametrize("policy", ["quorum", "in_flight"])
async def test_an_early_exit_aborts_a_topology_and_waits_for_what_is_written_elsewhere(
    policy: str,
) -> None:
    hold = Hold(first=0)
    arriving = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"Else"
        await arriving.wait()
        yield b"where."

    moa = ScriptedMoa()
    moa.engines["medium"].pace = hold.pace
    moa.engines["small"].answer = lambda _: Script("Answer: 7")
    async with api(moa) as served:
        graph = asyncio.ensure_future(served.post(PATH, said("Why?", agent="late", model="duo")))
        await hold.until_waiting()
        put = f"{served.url}/v1/agent/outputs/p/elsewhere"
        sent = asyncio.ensure_future(served.client.put(put, data=pieces()))
        exits = {"policy": policy, "min_completed": 1, "threshold": 0.2}
        read = sum_up("a", "late", "elsewhere", early_exit=exits)
        reading = asyncio.ensure_future(served.post(PATH, read))
        assert (await served.post(PATH, propose("a")))[0] == 200
        status, cut = await graph
        assert (status, cut["finish_reason"]) == (200, "abort")
        await until(lambda: not moa.running)
        arriving.set()
        async with await sent as response:
            assert response.status == 201
        assert (await reading)[0] == 200
        assert moa.prompts("large") == ["<user>Heard: Answer: 7Elsewhere.<assistant>"]


async def test_an_output_without_confidence_is_not_judged_and_the_stream_says_so() -> None:
    async with api() as served:
        for agent in ("a", "b"):
            assert (await served.post(PATH, {**propose(agent), "confidence": False}))[0] == 200
        put = f"{served.url}/v1/agent/outputs/p/late"
        arriving = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"Late."
            await arriving.wait()

        sent = asyncio.ensure_future(served.client.put(put, data=pieces()))
        exits = {"policy": "monotone", "threshold": 0.0}
        read = sum_up("a", "b", "late", early_exit=exits, stream=True)
        async with served.stream(read, PATH) as response:
            degraded = b""
            while degraded.count(b'"degraded"') < 2:
                degraded += await response.content.readany()
            arriving.set()
            rest = await response.read()
        (await sent).close()
        assert b"Its confidence is unknown" in degraded and b'"exit"' not in degraded + rest
        assert b'"finished"' in rest


@pytest.mark.parametrize(
    "early_exit",
    [
        {"policy": "never"},
        {"policy": "in_flight", "skip_aggregation": True},
        {"max_changed_percent": 2, "policy": "threshold"},
        {"straggler_factor": 3},
        {"ask_first": True, "policy": "first_answer"},
        {"grace_s": 3},
        {"tau": 2},
    ],
)
async def test_an_early_exit_that_agents_cannot_have_is_refused(early_exit: object) -> None:
    async with api() as served:
        status, body = await served.post(PATH, sum_up("a", early_exit=early_exit))
        assert status == 400 and body["error"]["param"].startswith("early_exit")


async def test_an_early_exit_without_precursors_has_no_effect() -> None:
    async with api() as served:
        read = sum_up(early_exit={"policy": "first_answer"})
        assert (await served.post(PATH, read))[0] == 200


async def test_an_exit_names_only_what_it_aborts_and_is_reported_once() -> None:
    async def pace(rid: str, piece: int) -> None:
        if rid.startswith("c."):
            await hold.pace(rid, piece)

    hold = Hold()
    moa = ScriptedMoa(pace=pace)
    moa.engines["small"].answer = lambda _: Script("Answer: 7", logprob=-0.001)
    async with api(moa) as served:
        cut = asyncio.ensure_future(served.post(PATH, propose("c")))
        await hold.until_waiting()
        for agent in "ab":
            assert (await served.post(PATH, propose(agent)))[0] == 200
        exits = {"policy": "first_answer", "threshold": 0.5}
        assert (await served.post(PATH, sum_up("a", "b", "c", early_exit=exits)))[0] == 200
        assert (await cut)[1]["finish_reason"] == "abort"
        _, traces = await served.get("/v1/traces")
        by_agent = {trace["agent"]: trace["id"] for trace in traces["data"]}
        _, trace = await served.get(f"/v1/traces/{by_agent['reader']}")
        assert [one["aborted"] for one in trace["exits"]] == [["c"]]


async def test_failed_and_blank_outputs_do_not_count_for_an_early_exit() -> None:
    hold = Hold(first=0)
    moa = ScriptedMoa()
    small = moa.engines["small"]
    by_agent = small.answer
    small.answer = lambda _: Script("half", error=EngineStalled("gone"))
    async with api(moa) as served:
        assert (await served.post(PATH, propose("failed")))[0] in (502, 504)
        put = f"{served.url}/v1/agent/outputs/p/blank"
        async with served.client.put(put, data=b" ") as response:
            assert response.status == 201
        small.answer = by_agent
        small.pace = hold.pace
        late = asyncio.ensure_future(served.post(PATH, propose("late")))
        await hold.until_waiting()
        exits = {"policy": "quorum", "min_completed": 1}
        read = sum_up("failed", "blank", "late", early_exit=exits, stream=True)
        async with served.stream(read, PATH) as response:
            begun = await response.content.readuntil(b"\n\n")
            hold.release()
            assert b'"finished"' in begun + await response.read()
        assert (await late)[1]["finish_reason"] == "stop"


async def test_an_early_exit_that_embeds_needs_an_embedder() -> None:
    moa = ScriptedMoa()
    moa.executor.embedder = None
    async with api(moa) as served:
        status, body = await served.post(PATH, sum_up("a", early_exit={"policy": "paper"}))
        assert status == 409 and "Set `embedder`" in body["error"]["message"]


async def test_deleting_a_program_ends_the_topology_that_is_its_agent() -> None:
    hold = Hold(first=0)
    async with api(ScriptedMoa(pace=hold.pace)) as served:
        running = asyncio.ensure_future(served.post(PATH, said("Why?", agent="a", model="duo")))
        await hold.until_waiting()
        async with served.client.delete(f"{served.url}{PATH}/p") as response:
            assert response.status == 200
        assert (await running)[0] == 502
        await until(lambda: not served.moa.running)


async def test_a_choice_among_unknown_models_is_refused_and_leaves_no_program() -> None:
    async with api() as served:
        asked = {"program": "ghost", "agent": "a", "model": ["absent", "small"], "prompt": ["Hi"]}
        assert (await served.post("/v1/agent/requests", asked))[0] == 404
        assert (await served.get("/v1/agent/requests/ghost"))[0] == 404
