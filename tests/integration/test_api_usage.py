"""The tokens that answers of several agents report, in the terms of each API."""

import json
from typing import Any

import pytest

from shell_router.api import ApiSettings
from shell_router.topology import parse_topology
from tests.fakes.api_server import Api, api, chat
from tests.fakes.moa import ScriptedMoa
from tests.fakes.topologies import parse_steps

ANSWER = "it is one and two"
SCRIPTS = {"left": "left thinks of it", "right": "right thinks of it and more", "root": ANSWER}
HIDDEN = 10
SHOWN = 5
VOTE = parse_topology(
    "name: vote\ntree: {shape: [3, 1], models: [small], root: {vote: majority}}", source="vote.yaml"
)
STEPS = parse_steps(
    """name: steps
start: [{go: quick}]
steps:
  quick: {model: small, then: [{go: careful}]}
  careful: {model: large, precursors: [quick], answer: quick}
""",
    source="steps.yaml",
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(stream_options={"include_usage": True}),
    "/v1/responses": {"model": "duo", "input": "What is it?"},
    "/v1/messages": chat(max_tokens=64),
    "/v1/agent/requests": {**chat(), "program": "p", "agent": "a"},
}


async def read_usage(served: Api, route: str, stream: bool, **fields: object) -> tuple[int, int]:
    """Ask on a route, and return the tokens of the output, and those that are not shown."""
    body = {**BODIES[route], "stream": stream, **fields}
    async with served.stream(body, route) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    sent = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    usages: list[dict[str, Any]] = []
    for part in sent if stream else [json.loads(text)]:
        usages += [
            found["usage"] for found in (part, part.get("response", {})) if found.get("usage")
        ]
    usage = usages[-1]
    details = usage.get("completion_tokens_details", usage.get("output_tokens_details", {}))
    hidden = details.get("reasoning_tokens", details.get("thinking_tokens", 0))
    return usage.get("completion_tokens", usage.get("output_tokens")), hidden


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
async def test_usage_sums_all_agents_and_tells_the_shown_output_from_the_hidden(
    route: str, stream: bool
) -> None:
    async with api(ScriptedMoa(SCRIPTS)) as served:
        assert await read_usage(served, route, stream) == (HIDDEN + SHOWN, HIDDEN)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
async def test_usage_of_the_root_counts_the_shown_output_alone(route: str, stream: bool) -> None:
    async with api(ScriptedMoa(SCRIPTS)) as served:
        assert await read_usage(served, route, stream, usage="root") == (SHOWN, 0)


@pytest.mark.parametrize("route", BODIES)
async def test_a_request_sets_what_its_usage_counts_before_the_deployment(route: str) -> None:
    async with api(ScriptedMoa(SCRIPTS), ApiSettings(usage="root")) as served:
        assert await read_usage(served, route, False) == (SHOWN, 0)
        every = {"usage": "all", "program": "other"} if "agent" in route else {"usage": "all"}
        assert await read_usage(served, route, False, **every) == (HIDDEN + SHOWN, HIDDEN)


async def test_an_output_that_a_vote_forwards_is_the_shown_one() -> None:
    scripts = {"proposer-1": "a 4", "proposer-2": "it is 4", "proposer-3": "so it is 5"}
    moa = ScriptedMoa({name: f"{said} Answer: {said[-1]}" for name, said in scripts.items()})
    async with api(moa, topologies=(VOTE,)) as served:
        status, answer = await served.post(
            "/v1/chat/completions", chat(model="vote", include_agents=True)
        )
        assert status == 200
        spent = [agent["completion_tokens"] for agent in answer["agents"].values()]
        usage = answer["usage"]
        shown = usage["completion_tokens"] - usage["completion_tokens_details"]["reasoning_tokens"]
        text = answer["choices"][0]["message"]["content"]
        assert usage["completion_tokens"] == sum(spent)
        assert shown == len(moa.tokenizers["small"].encode(text))


async def test_the_output_of_an_earlier_step_that_is_the_answer_is_the_shown_one() -> None:
    moa = ScriptedMoa({"quick": "it is 2", "careful": "that was right and well said"})
    async with api(moa, topologies=(STEPS,)) as served:  # type: ignore[arg-type] # a topology of steps
        path = "/v1/chat/completions"
        assert await read_usage(served, path, False, model="steps") == (10, 6)
        assert await read_usage(served, path, False, model="steps", usage="root") == (4, 0)


async def test_a_plain_models_usage_has_no_hidden_tokens() -> None:
    async with api(ScriptedMoa({"small": ANSWER})) as served:
        for usage in ("all", "root"):
            found = await read_usage(
                served, "/v1/chat/completions", False, model="small", usage=usage
            )
            assert found[1] == 0 and found[0] > 0


@pytest.mark.parametrize("route", [route for route in BODIES if "agent" not in route])
async def test_openrouters_object_leaves_the_count_to_the_deployment(route: str) -> None:
    async with api(ScriptedMoa(SCRIPTS), ApiSettings(usage="root")) as served:
        assert await read_usage(served, route, False, usage={"include": True}) == (SHOWN, 0)


async def test_only_known_agents_can_be_counted() -> None:
    async with api() as served:
        status, answer = await served.post("/v1/chat/completions", chat(usage="leaves"))
        assert status == 400
        assert answer["error"]["param"] == "usage"
