"""Chat completions over a socket: what goes in, what comes out, what is refused."""

import json

import pytest

from shell_router.api import ApiSettings
from shell_router.core.events import Emit
from shell_router.errors import EngineRejected, EngineStalled, EngineUnreachable
from shell_router.moa.requests import Answer, MoaRequest
from shell_router.topology import Topology, parse_topology
from tests.fakes.api_server import DUO, Api, api, chat
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Gates, Hold, Script

PASSING = parse_topology(
    """name: passing
agents: {a: {model: small}, b: {model: medium}, root: {model: large, precursors: [a, b]}}
early_exit: {policy: in_flight, threshold: 0.5, skip_aggregation: on}
""",
    source="passing.yaml",
)
VOTING = parse_topology(
    (
        "name: voting\nagents: {a: {model: small}, b: {model: medium}, root: {vote: majority, "
        "precursors: [a, b]}}\n"
    ),
    source="voting.yaml",
)


def unframed(stream: bytes) -> list[tuple[str, object]]:
    """Name and JSON of each event; comments and the end mark are left out."""
    events = []
    for frame in stream.decode().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":")
        )
        if fields and fields["data"] != "[DONE]":
            events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events


async def streamed(served: Api, body: object) -> list[tuple[str, object]]:
    async with served.stream(body) as response:
        assert response.status == 200
        return unframed(await response.read())


async def test_sampling_goes_to_the_root_and_messages_are_put_in() -> None:
    async with api() as served:
        status, _ = await served.post(
            "/v1/chat/completions", chat("Why?", temperature=0.3, max_tokens=9, seed=5)
        )
        root = served.moa.engines["large"].generated[0]
        assert status == 200
        assert (
            root.sampling.items()
            >= {"temperature": 0.3, "max_new_tokens": 9, "sampling_seed": 5}.items()
        )
        assert "Why?" in served.moa.prompt_of("root") and "left thinks" in served.moa.prompt_of(
            "root"
        )


async def test_a_model_is_asked_all_messages_as_they_are() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    async with api() as served:
        await served.post("/v1/chat/completions", {"model": "small", "messages": messages})
        expected = "<system>Be brief.<user>One?<assistant>Two.<user>Three?<assistant>"
        assert served.moa.prompt_of("small") == expected


async def test_agents_are_reported_when_asked_for() -> None:
    async with api() as served:
        _, body = await served.post("/v1/chat/completions", chat(include_agents=True))
        assert list(body["agents"]) == ["left", "right", "root"]
        assert body["agents"]["left"].pop("token_s") > 0
        assert body["agents"]["left"] | {"prompt_tokens": 0, "cached_tokens": 0} == {
            "model": "small",
            "state": "finished",
            "prompt_tokens": 0,
            "completion_tokens": 10,
            "cached_tokens": 0,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "reasoning_tokens": 0,
            "finish_reason": "stop",
            "error": "",
            "cost": 0.0,
            "estimated": False,
            "confidence": None,
        }
        _, body = await served.post("/v1/chat/completions", chat())
        assert "agents" not in body


async def test_a_stream_names_agents_events_only_when_asked_for() -> None:
    async with api() as served:
        plain = await streamed(served, chat(stream=True))
        assert {name for name, _ in plain} == {""}
        full = await streamed(served, chat(stream=True, include_agents=True))
        names = [name for name, _ in full]
        assert (
            names.index("agent.started")
            < names.index("agent.tokens")
            < names.index("agent.finished")
        )
        assert all(chunk["choices"] == [] for name, chunk in full if name)  # type: ignore[index]


@pytest.mark.parametrize(
    ("topology", "model"), [(PASSING, "large"), (VOTING, "vote")], ids=["skipped", "vote"]
)
async def test_an_answer_that_is_forwarded_is_streamed_and_reported(
    topology: Topology, model: str
) -> None:
    said = {"a": "it is Answer: 4", "b": "yes it is Answer: 4"}
    async with api(ScriptedMoa(said), topologies=(topology,)) as served:
        events = await streamed(served, chat(model=topology.name, stream=True, include_agents=True))
        (reported,) = [chunk["agent_event"] for name, chunk in events if name == "agent.skipped"]  # type: ignore[index]
        assert reported["agent"] == "root" and reported["source"] in said and "text" not in reported
        choices = [choice for _, chunk in events for choice in chunk["choices"]]  # type: ignore[index]
        assert (
            "".join(choice["delta"].get("content", "") for choice in choices)
            == said[reported["source"]]
        )
        assert choices[-1]["finish_reason"] == "stop"
        _, body = await served.post(
            "/v1/chat/completions", chat(model=topology.name, include_agents=True)
        )
        assert body["choices"][0]["message"]["content"] in said.values()
        assert (body["agents"]["root"]["state"], body["agents"]["root"]["model"]) == (
            "skipped",
            model,
        )
        assert body["agents"]["root"]["completion_tokens"] == 0
        _, trace = await served.get(f"/v1/traces/{body['id'].removeprefix('chatcmpl-')}")
        assert trace["agents"]["root"]["state"] == "skipped"
        assert trace["agents"]["root"]["source"] in said
        count = served.services.metrics.registry.get_sample_value
        assert count("shell_router_aggregations_skipped_total", {"model": model}) == 2


async def test_a_dropped_agent_is_reported_and_the_answer_comes() -> None:
    broken = Script("x", error=EngineUnreachable("connection refused."))
    async with api(ScriptedMoa({"right": broken})) as served:
        _, body = await served.post("/v1/chat/completions", chat(include_agents=True))
        assert body["agents"]["right"]["state"] == "failed"
        events = await streamed(served, chat(stream=True, include_agents=True))
        failed = [chunk["agent_event"] for name, chunk in events if name == "agent.failed"]  # type: ignore[index]
        assert failed[0]["agent"] == "right" and failed[0]["dropped"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineUnreachable("connection refused."), 502, "engine_error"),
        (EngineStalled("nothing came."), 504, "engine_stalled"),
        (EngineRejected("bad regex", status=400), 400, "rejected_by_engine"),
    ],
)
async def test_an_engines_failure_has_its_status_and_the_next_request_works(
    error: EngineUnreachable, status: int, code: str
) -> None:
    async with api(ScriptedMoa({"left": Script("x", error=error)})) as served:
        answered, body = await served.post("/v1/chat/completions", chat())
        assert (answered, body["error"]["code"]) == (status, code)
        assert served.moa.running == set()
        answered, _ = await served.post("/v1/chat/completions", chat(model="small"))
        assert answered == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_run_is_refused_with_a_status_before_anything_runs(stream: bool) -> None:
    async with api(ScriptedMoa(context_length=64)) as served:
        long = chat("word " * 100, stream=stream)
        for body, wanted in (
            (long, (400, "context_length_exceeded")),
            (chat(model="missing", stream=stream), (404, "model_not_found")),
            (chat(messages=[], stream=stream), (400, "invalid_field")),
            (chat(temperature="hot", stream=stream), (400, "invalid_field")),
        ):
            status, answer = await served.post("/v1/chat/completions", body)
            assert (status, answer["error"]["code"]) == wanted
        assert not any(engine.generated for engine in served.moa.engines.values())


async def test_malformed_json_is_refused() -> None:
    async with (
        api() as served,
        served.client.post(served.url + "/v1/chat/completions", data=b"{oops") as response,
    ):
        assert response.status == 400
        assert "not JSON" in (await response.json())["error"]["message"]


async def test_a_body_over_the_limit_is_refused() -> None:
    async with api(settings=ApiSettings(max_body_bytes=1000)) as served:
        status, body = await served.post("/v1/chat/completions", chat("x" * 2000))
        assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_unknown_fields_are_named_in_a_header_and_in_warnings() -> None:
    async with api() as served:
        names = ("colour", "a??b", "verbosity", "reasoning_effort")
        hints = {"verbosity": "low", "reasoning_effort": "low"}
        body = chat(colour=1, user="me", **{"a\r\nb": 1}, **hints)
        async with served.client.post(served.url + "/v1/chat/completions", json=body) as response:
            assert response.headers["x-ignored-fields"] == ", ".join(names)
            assert (await response.json())["warnings"] == [
                f"{name} was ignored: it has no effect here." for name in names
            ]


async def test_requests_over_the_limit_are_asked_to_come_again_and_others_still_end() -> None:
    hold = Hold(first=0)
    async with api(
        ScriptedMoa(pace=hold.pace), ApiSettings(max_running=1, retry_after_s=7)
    ) as served:
        async with served.stream(chat(stream=True)) as running:
            async with served.client.post(
                served.url + "/v1/chat/completions", json=chat()
            ) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (429, "7")
            assert (await served.get("/v1/models"))[0] == 200
            hold.release()
            assert b"[DONE]" in await running.read()
        assert (await served.post("/v1/chat/completions", chat()))[0] == 200


async def test_a_request_over_its_time_fails_with_504_or_inside_its_stream() -> None:
    hold = Hold(first=0)
    async with api(ScriptedMoa(pace=hold.pace), ApiSettings(request_timeout_s=0.05)) as served:
        status, body = await served.post("/v1/chat/completions", chat())
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        events = await streamed(served, chat(stream=True))
        assert events[-1][1]["error"]["code"] == "deadline_exceeded"  # type: ignore[index]
        assert served.moa.running == set()


async def test_the_head_comes_at_once_and_silence_is_filled_with_comments() -> None:
    gates = Gates("root")
    moa = ScriptedMoa(pace=gates.pace)
    async with (
        api(moa, ApiSettings(ping_s=0.01)) as served,
        served.stream(chat(stream=True)) as response,
    ):
        assert response.status == 200 and "x-trace-id" in response.headers
        assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        gates.open("root")
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_an_unexpected_error_is_logged_and_gives_nothing_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Script("x", error=RuntimeError("secret"))  # type: ignore[arg-type] # a fault no adapter should have
    async with api(ScriptedMoa({"left": broken})) as served:
        async with served.client.post(
            served.url + "/v1/chat/completions", json=chat(), headers={"x-request-id": "mine-1"}
        ) as response:
            text = await response.text()
            assert response.status == 500 and "mine-1" in text and "secret" not in text
        assert "mine-1" in caplog.text and "secret" in caplog.text


async def test_request_ids_are_the_clients_where_fit_and_fresh_otherwise() -> None:
    async with api() as served:
        for given, kept in (("abc-1.x:y", True), ("spaces are unfit", False), ("x" * 129, False)):
            async with served.client.get(
                served.url + "/health", headers={"x-request-id": given}
            ) as response:
                assert (response.headers["x-request-id"] == given) is kept


async def test_a_run_is_traced_and_other_tenants_do_not_see_it() -> None:
    settings = ApiSettings(keys={"me": "sk-1", "other": "sk-2"})
    async with api(settings=settings) as served:
        mine, others = {"Authorization": "Bearer sk-1"}, {"Authorization": "Bearer sk-2"}
        _, body = await served.post("/v1/chat/completions", chat(), **mine)
        path = "/v1/traces/" + body["id"].removeprefix("chatcmpl-")
        status, trace = await served.get(path, **mine)
        assert (
            status == 200
            and trace["state"] == "finished"
            and set(trace["agents"]) == set(DUO.agents)
        )
        assert (await served.get(path, **others))[0] == 404
        assert (await served.get(path))[0] == 401


class Kept:
    """Keeps what it is asked to run."""

    def __init__(self) -> None:
        self.requests: list[MoaRequest] = []

    async def run(self, topology: Topology, request: MoaRequest, emit: Emit) -> Answer:
        self.requests.append(request)
        return Answer("", "stop", {})


async def test_requests_draw_their_own_seeds_unless_given_one() -> None:
    kept = Kept()
    async with api(executor=kept) as served:
        for body in (chat(), chat(), chat(seed=7)):
            assert (await served.post("/v1/chat/completions", body))[0] == 200
    first, second, third = kept.requests
    assert first.seed != second.seed and third.seed == 7
    assert len({request.id for request in kept.requests}) == 3


async def test_an_answer_says_which_engine_gave_it_and_why() -> None:
    async with api() as served:
        async with served.client.post(f"{served.url}/v1/chat/completions", json=chat()) as response:
            assert response.headers["x-shell-router-engine"] == "engine-0 (scripted: only_engine)"
        events = await streamed(served, chat(stream=True, include_agents=True))
        placed = [event["agent_event"] for name, event in events if name == "agent.placed"]  # type: ignore[index]
        assert {one["agent"] for one in placed} == {"left", "right", "root"}
        assert placed[0]["placed"][0]["why"] == "only_engine"


async def test_a_stream_that_begins_before_its_engine_is_known_does_not_name_one() -> None:
    async with api() as served, served.stream(chat(stream=True)) as response:
        await response.read()
        assert "x-shell-router-engine" not in response.headers
