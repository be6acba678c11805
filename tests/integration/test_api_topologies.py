"""Topologies inside of requests, topologies that are put and deleted while requests run, and panels
of models.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
from yarl import URL

from shell_router.errors import EngineUnreachable, PromptRefused, PromptTooLong
from shell_router.topology import LiveSettings, parse_topology
from tests.fakes.api_server import DUO, WAYS, Api, api, chat, hear, until
from tests.fakes.moa import ScriptedMoa, WordTokenizer, agent_of
from tests.fakes.scripted_engine import Gates, Script

PAIR = {"agents": {"a": {"model": "small"}, "root": {"model": "large", "precursors": ["a"]}}}
LIMITED = LiveSettings(api=True, max_agents=4, max_bytes=2000)
Put = Callable[[str, object], Awaitable[tuple[int, dict[str, Any]]]]
DEEP: Any = "x"
for _ in range(70):
    DEEP = [DEEP]


def brought(topology: object, **fields: object) -> dict[str, object]:
    body = chat(topology=topology, **fields)
    if "model" not in fields:
        del body["model"]
    return body


def sender(served: Api, method: str) -> Put:
    async def send(name: str, body: object = None) -> tuple[int, dict[str, Any]]:
        url = f"{served.url}/v1/topologies/{name}"
        async with served.client.request(method, url, json=body) as response:
            return response.status, await response.json()

    return send


async def test_a_topology_inside_of_a_request_runs_and_the_reply_names_what_the_client_named() -> (
    None
):
    async with api(ScriptedMoa({"root": "it is 4"})) as served:
        for named, shown in (({}, "inline"), ({"model": "mine"}, "mine")):
            status, body = await served.post(
                "/v1/chat/completions", brought(PAIR, include_agents=True, **named)
            )
            assert (status, body["model"]) == (200, shown), body
            assert body["choices"][0]["message"]["content"] == "it is 4"
            assert list(body["agents"]) == ["a", "root"]
        status, body = await served.post("/v1/responses", {"input": "How much?", "topology": PAIR})
        assert (status, body["model"], body["output"][0]["content"][0]["text"]) == (
            200,
            "inline",
            "it is 4",
        ), body
        steps = {"start": "s", "steps": {"s": {"topology": "duo"}}}
        status, body = await served.post(
            "/v1/chat/completions", brought(steps, include_agents=True)
        )
        assert list(body["agents"]) == ["s/left", "s/right", "s/root"]
        count = served.services.metrics.registry.get_sample_value
        ended = {"target": "inline", "outcome": "finished"}
        assert count("shell_router_run_seconds_count", ended) == 4  # clients make up no series
        assert len(served.services.topologies._inline) == 2


async def test_a_topology_of_one_agent_gives_a_model_a_second_name_as_on_hubs() -> None:
    name = "Qwen/Qwen2.5-72B"
    async with api(ScriptedMoa({"only": "it is 4"})) as served:
        at = URL(f"{served.url}/v1/topologies/{quote(name, safe='')}", encoded=True)
        async with served.client.put(at, json={"agents": {"only": {"model": "small"}}}) as response:
            assert response.status == 201, await response.json()
        status, body = await served.post("/v1/chat/completions", chat(model=name))
        assert (status, body["model"], body["choices"][0]["message"]["content"]) == (
            200,
            name,
            "it is 4",
        )
        async with served.client.delete(at) as response:
            assert response.status == 200


MALFORMED: dict[str, tuple[object, str]] = {
    "not an object": ([], "topology"),
    "no graph": ({}, "topology"),
    "an unknown key": ({**PAIR, "agnets": {}}, "topology.agnets"),
    "a wrong kind": ({"agents": {"a": {"model": 3}}}, "topology.agents.a.model"),
    "an unknown model": ({"agents": {"a": {"model": "absent"}}}, "topology.agents.a.model"),
    "an unknown fallback": (
        {"agents": {"a": {"model": "small", "fallbacks": ["no"]}}},
        "topology.agents.a.fallbacks[0]",
    ),
    "auto as a fallback": (
        {"agents": {"a": {"model": "small", "fallbacks": ["auto"]}}},
        "topology.agents.a.fallbacks[0]",
    ),
    "too many agents in steps": (
        {"start": "s", "steps": {"s": {"topology": "duo", "then": "t"}, "t": {"topology": "duo"}}},
        "topology",
    ),
    "an unknown precursor": (
        {"agents": {"a": {"model": "small", "precursors": ["b"]}}},
        "topology.agents.a.precursors[0]",
    ),
    "a circle": (
        {"agents": {n: {"model": "small", "precursors": [m]} for n, m in (("a", "b"), ("b", "a"))}},
        "topology.agents.b.precursors",
    ),
    "too many agents": ({"tree": {"shape": [4, 1], "models": ["small"]}}, "topology"),
    "too many agents to build": (
        {"all_to_all": {"shape": [500, 500, 1], "models": ["small"]}},
        "topology",
    ),
    "too many bytes": ({**PAIR, "description": "x" * 2000}, "topology"),
    "too deep": ({**PAIR, "defaults": {"sampling": {"x": DEEP}}}, "topology"),
    "a bad pattern": (
        {
            "start": [{"when": {"matches": "("}, "go": "s"}, {"go": "s"}],
            "steps": {"s": {"model": "small"}},
        },
        "topology.start[0].when.matches",
    ),
    "an unknown topology of a step": (
        {"start": "s", "steps": {"s": {"topology": "absent"}}},
        "topology.steps.s.topology",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_document_is_refused_by_path_and_nothing_is_asked_or_served(
    case: str,
) -> None:
    document, path = MALFORMED[case]
    async with api(live_settings=LIMITED) as served:
        status, body = await served.post("/v1/chat/completions", brought(document))
        assert (status, body["error"]["code"], body["error"]["param"]) == (
            400,
            "invalid_field",
            path,
        ), body
        put_status, put = await sender(served, "PUT")("mine", document)
        assert put_status == 400, put
        assert (put["error"]["param"] or "") == path.removeprefix("topology").removeprefix(".")
        assert "mine" not in served.services.topologies
        assert not any(engine.generated for engine in served.moa.engines.values())


async def test_topologies_are_put_listed_read_replaced_and_deleted() -> None:
    async with api() as served:
        put, delete = sender(served, "PUT"), sender(served, "DELETE")
        assert await put("mine", PAIR) == (201, {"name": "mine", "source": "put"})
        assert (await put("mine", {**PAIR, "description": "changed"}))[0] == 200
        _, listed = await served.get("/v1/topologies")
        assert [(one["name"], one["source"]) for one in listed["data"]] == [
            ("duo", "file"),
            ("mine", "put"),
        ]
        _, document = await served.get("/v1/topologies/mine")
        assert document == {**PAIR, "name": "mine", "description": "changed"}
        _, model = await served.get("/v1/models/mine")
        assert (model["kind"], model["source"], model["description"]) == (
            "topology",
            "put",
            "changed",
        )
        assert (await put("steps", {"start": "s", "steps": {"s": {"topology": "mine"}}}))[0] == 201
        for status, answer in (
            await put("small", PAIR),  # a model's name
            await put("auto", PAIR),
            await put("duo", PAIR),  # a file's
            await delete("duo"),
            await delete("mine"),  # `steps` names it
            await put("mine", {"start": "s", "steps": {"s": {"model": "small"}}}),
        ):
            assert (status, answer["error"]["code"]) == (409, "topology_conflict"), answer
        assert (await served.post("/v1/chat/completions", chat(model="steps")))[0] == 200
        for name in ("steps", "mine"):
            assert (await delete(name))[0] == 200
        assert (await delete("mine"))[0] == 404
        assert (await served.post("/v1/chat/completions", chat(model="mine")))[0] == 404


async def test_a_key_that_a_json_topology_has_twice_is_named() -> None:
    async with api() as served:
        for text in (
            '{"agents": {"p": {"model": "small"}, "p": {"model": "large"}}}',
            '{"agents": {"p": {"model": "small"}}, "agents": {}}',
            '{"agents": {"p": {"model": "small", "sampling": {"top_p": 1, "top_p": 0.5}}}}',
        ):
            async with served.client.put(
                f"{served.url}/v1/topologies/mine",
                data=text,
                headers={"Content-Type": "application/json"},
            ) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["message"].endswith("twice. Keep one of them.")) == (
                    400,
                    True,
                )
            for route in ("chat/completions", "responses", "messages"):
                body = chat(input="q", max_tokens=9, topology=0)
                sent = json.dumps(body).replace('"topology": 0', f'"topology": {text}')
                async with served.client.post(
                    f"{served.url}/v1/{route}",
                    data=sent,
                    headers={"Content-Type": "application/json"},
                ) as answer:
                    assert answer.status == 400
                    message = (await answer.json())["error"]["message"]
                    assert message.endswith("twice. Keep one of them.")
        nested = "[" * 900 + "]" * 900
        async with served.client.put(
            f"{served.url}/v1/topologies/mine",
            data=f'{{"agents": {nested}}}',
            headers={"Content-Type": "application/json"},
        ) as answer:
            assert answer.status == 400


async def test_a_name_with_slashes_is_found_in_paths_as_it_is() -> None:
    async with api() as served:
        async with served.client.put(f"{served.url}/v1/topologies/Org/Model-1", json=PAIR) as put:
            assert (put.status, (await put.json())["name"]) == (201, "Org/Model-1")
        for path in ("Org/Model-1", "Org%2FModel-1"):
            status, model = await served.get(f"/v1/models/{path}")
            assert (status, model["id"], model["max_model_len"]) == (200, "Org/Model-1", 4096)
            assert (await served.get(f"/v1/topologies/{path}"))[0] == 200
        assert (await served.get("/v1/models/Org/Model"))[1]["error"]["code"] == "model_not_found"
        async with served.client.delete(f"{served.url}/v1/topologies/Org/Model-1") as deleted:
            assert deleted.status == 200


@pytest.mark.parametrize("name", ["a b", "x\ny", "a" * 5000, "inline"])
async def test_the_routes_name_is_checked_as_a_documents_is(name: str) -> None:
    async with api() as served:
        status, body = await sender(served, "PUT")(quote(name), PAIR)
        assert (status, body["error"]["code"], body["error"]["param"]) == (
            400,
            "invalid_field",
            "name",
        ), body
        assert [one["name"] for one in (await served.get("/v1/topologies"))[1]["data"]] == ["duo"]


async def test_clients_change_nothing_unless_the_deployment_lets_them() -> None:
    async with api(live_settings=LiveSettings(inline=False)) as served:
        refused = [
            await sender(served, "PUT")("mine", PAIR),
            await sender(served, "DELETE")("duo"),
            await served.get("/v1/topologies"),
            await served.get("/v1/topologies/duo"),
            await served.post("/v1/chat/completions", brought(PAIR)),
            await served.post("/v1/chat/completions", chat(models=["small"])),
        ]
        assert {(status, body["error"]["code"]) for status, body in refused} == {
            (403, "topologies_off")
        }


async def test_streams_keep_the_graph_that_they_began_with_while_it_is_replaced_and_deleted() -> (
    None
):
    gates = Gates("root")
    async with api(ScriptedMoa({"root": "it is 4"}, pace=gates.pace)) as served:
        put, delete = sender(served, "PUT"), sender(served, "DELETE")
        await put("mine", PAIR)

        async def stream() -> str:
            async with served.stream(
                chat(model="mine", stream=True, include_agents=True)
            ) as response:
                return (await response.read()).decode()

        streams = [asyncio.create_task(stream()) for _ in range(32)]
        await gates.until_waiting(32)
        for number in range(20):
            three = {
                "tree": {"shape": [2, 1], "models": ["small", "medium"]},
                "description": str(number),
            }
            assert (await put("mine", three if number % 2 else PAIR))[0] == 200
        assert (await delete("mine"))[0] == 200
        assert (await served.post("/v1/chat/completions", chat(model="mine")))[0] == 404
        gates.open("root")
        for text in await asyncio.gather(*streams):
            assert (
                '"it is 4"' in text and "proposer" not in text and text.endswith("data: [DONE]\n\n")
            )
        await until(lambda: not served.moa.running)
        async with served.client.get(f"{served.url}/metrics") as response:
            assert 'target="mine"' not in await response.text()


PANELS: dict[str, tuple[dict[str, object], list[str], str]] = {
    "ours": ({"models": ["small", "medium"], "judge": "large"}, ["small", "medium"], "large"),
    "a list of judges": (
        {"models": ["small", "small"], "judge": ["large", "medium"]},
        ["small", "small"],
        "large",
    ),
    "LiteLLM's": (
        {
            "model": "litellm/fusion-1",
            "fusion": {"models": ["small"], "judge": {"model": "large", "criteria": "{x}"}},
        },
        ["small"],
        "large",
    ),
    "Merge's": (
        {"model": "fusion", "fusion": {"analysis_models": ["small"], "synthesis_model": "medium"}},
        ["small"],
        "medium",
    ),
    "OpenRouter's plugin": (
        {"model": "large", "plugins": [{"id": "fusion", "analysis_models": ["small", "medium"]}]},
        ["small", "medium"],
        "large",
    ),
    "only members": ({"models": ["small", "medium"], "quorum": 2}, ["small", "medium"], "small"),
    "members, and a model that judges": (
        {"model": "large", "models": ["small"], "criteria": "strict"},
        ["small"],
        "large",
    ),
    "models, and a judge of them": (
        {"model": ["small", "medium"], "judge": "large"},
        ["small", "medium"],
        "large",
    ),
    "a model, and a judge of it": ({"model": "small", "judge": ["large"]}, ["small"], "large"),
    "OpenRouter's alias": (
        {"model": "openrouter/fusion"},
        ["other", "small", "medium", "large"],
        "other",
    ),
}


@pytest.mark.parametrize("media_type", ["application/yaml", "text/yaml", "application/x-yaml"])
async def test_a_topology_files_yaml_is_put_and_what_is_wrong_with_it_is_named_by_its_line(
    media_type: str,
) -> None:
    async with api() as served:

        async def put(text: bytes) -> tuple[int, dict[str, Any]]:
            kind = {"Content-Type": media_type}
            async with served.client.put(
                f"{served.url}/v1/topologies/mine", data=text, headers=kind
            ) as answer:
                return answer.status, await answer.json()

        status, _ = await put(b"name: mine\nagents:\n  a: {model: small} # a comment\n")
        assert (status, served.services.topologies["mine"].root.model) == (201, "small")
        for text, said in (
            (b"agents:\n  a: [", "mine.yaml:2"),
            (b"agents: {a: {model: small}, a: {model: large}}", "mine.yaml:1"),
            (b"- a", "not a mapping"),
            (b"", "empty"),
            (b"\xff", "utf-8"),
            (b"agents: " + b"[" * 100_000, "nested"),
            (b"agents: {a: {model: absent}}", "agents.a.model"),
        ):
            status, body = await put(text)
            assert status == 400 and said in str(body["error"]), (text[:50], body)
        assert served.services.topologies["mine"].root.model == "small"


@pytest.mark.parametrize("shape", PANELS)
async def test_a_panel_answers_side_by_side_and_the_judge_reads_all(shape: str) -> None:
    fields, members, judge = PANELS[shape]
    async with api(ScriptedMoa({"judge": "it is 4"})) as served:
        body = {"messages": chat()["messages"], "include_agents": True, **fields}
        status, answer = await served.post("/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == "it is 4"
        names = fields.get("model", "fusion")
        assert answer["model"] == (names[0] if isinstance(names, list) else names)
        used = [one["model"] for one in answer["agents"].values()]
        assert used == [*members, judge]
        assert all(
            f"panel-{n} speaks" in served.moa.prompt_of("judge") for n in range(1, len(members) + 1)
        )


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"models": ["small", "absent"], "judge": "large"}, "models[1]"),
        ({"models": "small", "judge": "absent"}, "judge[0]"),
        ({"fusion": {"models": ["small"], "preset": "x"}}, "fusion.preset"),
        ({"fusion": {"models": ["small"], "quorum": 2}}, "fusion.quorum"),
        ({"fusion": {"models": [3]}}, "fusion.models[0]"),
        ({"fusion": {"models": ["small"]}, "judge": "large"}, "judge"),
        ({"plugins": [{"id": "web"}]}, "plugins[0].id"),
        ({"topology": PAIR, "judge": "large"}, "topology"),
        ({"models": [], "judge": "large"}, "models"),
        ({"models": []}, "models"),
        ({"model": "small", "judge": []}, "judge"),
        ({"model": "small", "fusion": {}}, "fusion.models"),
        ({"model": "small", "plugins": [{"id": "fusion"}]}, "plugins[0].models"),
        ({"model": "absent", "judge": "large"}, "model[0]"),
        ({"model": None, "judge": "large"}, "models"),
    ],
)
async def test_a_panel_that_cannot_be_is_refused_by_path(
    fields: dict[str, object], path: str
) -> None:
    async with api() as served:
        status, body = await served.post("/v1/chat/completions", chat(**fields))
        assert (status, body["error"]["param"]) == (400, path), body


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"models": ["small"], "judge": "large"}, 77),
        ({"fusion": {"models": ["small"], "max_completion_tokens": 5}}, 5),
    ],
)
async def test_the_clients_limit_holds_for_members_too_and_cut_drafts_are_named(
    way: tuple[str, bool], fields: dict[str, object], limit: int
) -> None:
    moa = ScriptedMoa({"panel-1": Script("never", reason="length"), "judge": "it is 4"})
    async with api(moa) as served:
        heard = await hear(served, way, chat()["messages"], **fields, max_tokens=77)
        asked = next(one for one in moa.engines["small"].generated if agent_of(one) == "panel-1")
        assert asked.sampling["max_new_tokens"] == limit
        assert (heard.status, heard.text) == (200, "it is 4")
        (warning,) = heard.warnings
        assert "cut at their limit" in warning and "panel-1" in warning


async def test_an_answer_that_is_cut_itself_is_told_by_its_finish_reason_alone() -> None:
    moa = ScriptedMoa({"root": Script("it is", reason="length")})
    async with api(moa) as served:
        _, body = await served.post("/v1/chat/completions", chat(include_agents=True))
        reasons = {name: one["finish_reason"] for name, one in body["agents"].items()}
        assert reasons == {"left": "stop", "right": "stop", "root": "length"}
        assert body["choices"][0]["finish_reason"] == "length" and "warnings" not in body


async def test_the_judge_begins_without_those_that_the_quorum_does_not_wait_for() -> None:
    gates = Gates("panel-3")
    async with api(ScriptedMoa(pace=gates.pace)) as served:
        panel = {"models": ["small", "medium", "large"], "quorum": 2, "grace_s": 0.01}
        _, body = await served.post("/v1/chat/completions", chat(fusion=panel, include_agents=True))
        states = {name: one["state"] for name, one in body["agents"].items()}
        assert states == {
            "panel-1": "finished",
            "panel-2": "finished",
            "panel-3": "early_exit",
            "judge": "finished",
        }
        assert not served.moa.running and served.moa.aborted == {"panel-3"}


async def test_a_judge_that_fails_is_replaced_by_the_next_model_and_the_reply_says_so() -> None:
    moa = ScriptedMoa()
    dead = Script("", error=EngineUnreachable("no engine"))
    for alias in ("large", "medium"):
        others = moa.engines[alias].answer
        moa.engines[alias].answer = lambda asked, others=others: (
            dead if asked.rid.endswith("judge") else others(asked)
        )
    async with api(moa) as served:
        body = chat(models=["medium", "small"], judge="large", include_agents=True)
        async with served.client.post(served.url + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.headers["x-model-choice"] == (
                "judge=medium, fallback: large failed; judge=small, fallback: medium failed"
            )
        assert answer["agents"]["judge"]["model"] == "small"
        labels = {"model": "small", "policy": "fallback", "why": "medium failed"}
        assert (
            served.services.metrics.registry.get_sample_value(
                "shell_router_model_choices_total", labels
            )
            == 1
        )


async def test_a_panel_of_which_all_fail_is_an_error_and_a_judge_that_has_begun_is_not_replaced() -> (
    None
):
    dead = EngineUnreachable("no engine")
    scripts = {"panel-1": Script("", error=dead), "panel-2": Script("", error=dead)}
    async with api(ScriptedMoa(scripts)) as served:
        status, body = await served.post(
            "/v1/chat/completions", chat(fusion={"models": ["small", "medium"]})
        )
        assert (status, body["error"]["code"]) == (502, "agent_failed")
        assert "No agent of 'panel' has answered" in body["error"]["message"]
    broken = Script("it is four and more", piece_words=2, error=dead, error_after=1)
    moa = ScriptedMoa()
    others = moa.engines["small"].answer
    moa.engines["small"].answer = lambda asked: (
        broken if asked.rid.endswith("judge") else others(asked)
    )
    async with api(moa) as served:
        status, body = await served.post(
            "/v1/chat/completions", chat(fusion={"models": ["small", "medium"]})
        )
        assert (status, body["error"]["code"]) == (502, "engine_error")


class Strict(WordTokenizer):
    """Its template has no place for system messages."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *more: Any) -> str:
        if messages[0]["role"] == "system":
            raise PromptRefused("The template refuses system messages.")
        return super().render_chat(messages, *more)


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "word " * 60}]
REFUSALS = ("its context is short", "its template has no such role", "its engine says too long")


def refusing(refusal: str) -> ScriptedMoa:
    """Models of which `small` cannot take ASKED."""
    moa = ScriptedMoa({"judge": "it is 4"})
    if refusal == REFUSALS[0]:
        moa.models["small"] = replace(moa.models["small"], context_length=60)
    elif refusal == REFUSALS[1]:
        moa.models["small"] = replace(moa.models["small"], tokenizer=Strict())
    else:
        refused = Script("", error=PromptTooLong("Over the context."))  # type: ignore[arg-type]
        moa.engines["small"].answer = lambda request: refused
    return moa


def agents_of(moa: ScriptedMoa, alias: str) -> list[str]:
    """The agents that the model has answered."""
    return [agent_of(request) for request in moa.engines[alias].generated]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_member_and_a_judge_that_cannot_take_the_prompt_are_failed_ones(
    way: tuple[str, bool], refusal: str
) -> None:
    async with api(refusing(refusal)) as served:
        panel = {"models": ["small", "medium"], "judge": ["small", "large"]}
        heard = await hear(served, way, ASKED, **panel)
        assert (heard.status, heard.text) == (200, "it is 4")
        (warning,) = heard.warnings
        assert "panel-1" in warning and "'small'" in warning
        assert agents_of(served.moa, "medium") == ["panel-2"]
        assert agents_of(served.moa, "large") == ["judge"]
        prompt = served.moa.prompt_of("judge") if refusal != REFUSALS[2] else ""
        assert "panel-1 speaks" not in prompt
        assert not served.moa.running


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("way", WAYS)
async def test_without_another_way_to_an_answer_the_error_names_agent_and_model(
    way: tuple[str, bool], refusal: str
) -> None:
    both = {"a": {"model": "small"}, "b": {"model": "medium"}}
    root = {"model": "large", "precursors": ["a", "b"]}
    inner = {"model": "medium", "precursors": ["a"]}
    graphs = [
        {"agents": {**both, "root": root}},
        {"agents": {"a": {**both["a"], "on_failure": "drop"}, "root": inner}},
        {"agents": {"a": both["a"]}},
    ]
    for graph in graphs:
        async with api(refusing(refusal)) as served:
            heard = await hear(served, way, ASKED, topology=graph)
            assert heard.status == 400 or (refusal == REFUSALS[2] and heard.error)
            message = heard.error["message"]
            if refusal != REFUSALS[2]:
                assert not served.moa.engines["medium"].generated
            if refusal != REFUSALS[2] or graph is not graphs[1]:
                assert "'a'" in message and "'small'" in message, message
            assert "root" not in agents_of(served.moa, "large")


@pytest.mark.parametrize("refusal", REFUSALS[:2])
@pytest.mark.parametrize("way", WAYS)
async def test_a_model_that_cannot_take_the_prompt_is_not_chosen_and_fallbacks_replace_it(
    way: tuple[str, bool], refusal: str
) -> None:
    several = {"model": ["small", "medium"]}
    fallback = {"topology": {"agents": {"a": {"model": "small", "fallbacks": ["medium"]}}}}
    for fields in (several, fallback):
        async with api(refusing(refusal)) as served:
            heard = await hear(served, way, ASKED, **fields)
            assert (heard.status, heard.warnings) == (200, []) and heard.text
            assert not served.moa.engines["small"].generated


@pytest.mark.parametrize("refusal", REFUSALS[:2])
async def test_an_agent_request_leaves_models_out_that_cannot_take_its_prompt(refusal: str) -> None:
    async with api(refusing(refusal)) as served:
        body = {"program": "p", "agent": "a", "model": ["small", "medium"], "messages": ASKED}
        status, answer = await served.post("/v1/agent/requests", body)
        assert (status, answer.get("model")) == (200, "medium"), answer
        status, answer = await served.post(
            "/v1/agent/requests", {**body, "agent": "b", "model": "small"}
        )
        assert status == 400
        assert "'b'" in answer["error"]["message"] and "'small'" in answer["error"]["message"]


@pytest.mark.parametrize("blank", ["", " \n"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_blank_draft_is_no_answer(way: tuple[str, bool], blank: str) -> None:
    scripts = {"panel-1": blank, "judge": "it is 4"}
    panel = {"models": ["small", "medium"], "judge": "large", "quorum": 1}
    async with api(ScriptedMoa(scripts)) as served:
        heard = await hear(served, way, chat()["messages"], **panel)
        assert (heard.status, heard.text) == (200, "it is 4")
        (warning,) = heard.warnings
        assert "'panel-1' wrote nothing" in warning
        prompt = served.moa.prompt_of("judge")
        assert "panel-2 speaks" in prompt and "Draft 1" not in prompt
    async with api(ScriptedMoa({**scripts, "panel-2": blank})) as served:
        heard = await hear(served, way, chat()["messages"], **panel)
        assert "No agent of 'panel' has answered" in heard.error["message"]
        assert not served.moa.engines["large"].generated


@pytest.mark.parametrize("way", WAYS)
async def test_no_plugins_are_no_panel(way: tuple[str, bool]) -> None:
    async with api(ScriptedMoa({"small": "it is 4"})) as served:
        heard = await hear(served, way, chat()["messages"], model="small", plugins=[])
        assert (heard.status, heard.text, heard.warnings) == (200, "it is 4", [])
        assert len(served.moa.engines["small"].generated) == 1


async def test_a_panel_answers_a_response() -> None:
    async with api(ScriptedMoa({"judge": "it is 4"})) as served:
        panel = {"models": ["small", "medium"], "judge": "large", "quorum": 1}
        _, body = await served.post("/v1/responses", {"input": "How much?", **panel})
        assert (body["model"], body["output"][0]["content"][0]["text"]) == ("fusion", "it is 4"), (
            body
        )


async def test_the_judges_tokens_are_streamed_as_they_come() -> None:
    gates = Gates("judge")
    async with api(ScriptedMoa({"judge": "it is 4"}, pace=gates.pace)) as served:
        body = chat(model="openrouter/fusion", stream=True, include_agents=True)
        async with served.stream(body) as response:
            text = await response.content.readuntil(b"event: agent.finished\n")
            assert b"agent.tokens" in text
            gates.open("judge")
            assert b'"content":"it is 4"' in await response.read()


def test_a_quorum_in_a_file_is_the_same_policy() -> None:
    text = (
        "tree: {shape: [3, 1], models: [small]}\nearly_exit: {policy: quorum, min_completed: "
        "2, grace_s: 1.5}\n"
    )
    (cluster,) = parse_topology(text, source="f.yaml").clusters
    assert cluster.early_exit is not None
    assert (cluster.early_exit.min_completed, cluster.early_exit.grace_s) == (2, 1.5)
    assert DUO.clusters == ()
