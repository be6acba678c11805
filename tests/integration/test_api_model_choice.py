"""`auto` over HTTP: named, chosen, reported, and recorded."""

from pathlib import Path
from time import monotonic
from typing import Any

import orjson
import pytest

from shell_router.errors import ConfigError
from shell_router.moa.choosing import Auto, ModelChooser
from shell_router.moa.executor import Executor
from shell_router.telemetry.recorder import Recorder
from shell_router.topology import Agent, Topology
from tests.fakes.api_server import api, chat
from tests.fakes.moa import FixedPredictor, ScriptedMoa, open_programs

SCORES = {"small": 0.2, "medium": 0.5, "large": 0.9}


def choosing() -> ScriptedMoa:
    """Choices among three models whose scores are known."""
    moa = ScriptedMoa()
    auto = Auto(("small", "medium", "large"))
    chooser = ModelChooser(moa.models, auto, FixedPredictor(scores=SCORES), clock=monotonic)
    moa.executor = Executor(moa.models, moa.cache, moa.embedder, clock=monotonic, chooser=chooser)
    moa.programs = open_programs(moa.models, moa.cache, clock=monotonic, chooser=chooser)
    return moa


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("named", "chosen"), [("auto", "large"), (["small", "medium"], "medium")])
async def test_one_model_is_chosen_and_the_header_and_the_trace_say_which_and_why(
    named: object, chosen: str, stream: bool
) -> None:
    async with api(choosing()) as served:
        body = chat(model=named, stream=stream)
        async with served.client.post(served.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-model-choice"] == f"auto={chosen}, chimera: better"
            await response.read()
            trace_id = response.headers["x-trace-id"]
        _, trace = await served.get(f"/v1/traces/{trace_id}")
        assert trace["agents"]["auto"]["model"] == chosen
        assert trace["choices"][0] | {"start_s": 0, "end_s": 0, "waits": {}} == {
            "start_s": 0,
            "end_s": 0,
            "agents": ["auto"],
            "model": chosen,
            "policy": "chimera",
            "why": "better",
            "scores": {name: SCORES[name] for name in trace["choices"][0]["scores"]},
            "waits": {},
            "unmeasured": trace["choices"][0]["unmeasured"],
        }


async def test_auto_is_listed_and_a_topology_may_not_have_its_name() -> None:
    async with api(choosing()) as served:
        _, listed = await served.get("/v1/models/auto")
        assert listed["kind"] == "auto"
    with pytest.raises(ConfigError, match="auto"):
        async with api(topologies=(Topology("auto", {"a": Agent("a", "small")}),)):
            pass


@pytest.mark.parametrize(
    "named", [[], ["small", "small"], ["small", 7], ["small", "duo"], ["small", "unknown"]]
)
async def test_a_list_that_cannot_be_chosen_from_is_refused(named: object) -> None:
    async with api(choosing()) as served:
        status, _ = await served.post("/v1/chat/completions", chat(model=named))
        assert status in (400, 404)


async def test_an_agent_program_keeps_its_model() -> None:
    async with api(choosing()) as served:
        reported = []
        for agent in ("first", "second"):
            body = {"program": "p", "agent": agent, "model": "auto", "prompt": "Say something."}
            async with served.client.post(served.url + "/v1/agent/requests", json=body) as response:
                reported.append(
                    (response.headers["x-model-choice"], (await response.json())["model"])
                )
        assert reported == [
            ("first=large, chimera: better", "large"),
            ("second=large, chimera: kept", "large"),
        ]


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [
        orjson.loads(line)
        for file in folder.glob("*.jsonl")
        for line in file.read_bytes().splitlines()
    ]


@pytest.mark.parametrize("prompts", [False, True])
async def test_every_agents_run_is_recorded_and_texts_only_when_asked_for(
    tmp_path: Path, prompts: bool
) -> None:
    recorder = Recorder(
        "trace files", tmp_path, 2**20, lambda _outcome, _lines: None, prompts=prompts
    )
    async with api(choosing(), recorder=recorder) as served:
        await served.post("/v1/chat/completions", chat("What is it?"))
        program = {
            "program": "p",
            "agent": "solo",
            "model": "small",
            "prompt": ["a b ", {"output_of": "solo2"}],
        }
        await served.post("/v1/agent/requests", {**program, "agent": "solo2", "prompt": "a b"})
        await served.post("/v1/agent/requests", program)
    recorder.close()
    by_agent = {line["agent"]: line for line in lines_in(tmp_path)}
    assert {(name, line["stage"]) for name, line in by_agent.items()} == {
        ("left", "1"),
        ("right", "1"),
        ("root", "2"),
        ("solo", "solo"),
        ("solo2", "solo2"),
    }
    root = by_agent["root"]
    assert (root["topology"], root["model"], root["reads"]) == ("duo", "large", ["left", "right"])
    assert (root["user_tokens"], root["state"]) == (4, "finished")
    assert by_agent["solo"]["reads"] == ["solo2"]
    assert by_agent["solo"]["program"] == by_agent["solo2"]["program"] != root["program"]
    assert all(
        line["output_tokens"] > 0 and line["prompt_tokens"] >= line["user_tokens"]
        for line in by_agent.values()
    )
    if prompts:
        assert (root["user"], root["output"].split()[0]) == ("What is it?", "root")
    else:
        assert not {"user", "system", "rest", "output"} & root.keys()
