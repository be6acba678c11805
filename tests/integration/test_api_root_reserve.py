"""Graphs and panels that keep time for their roots, over every route that answers chats."""

from dataclasses import replace

import pytest

from shell_router.api import ApiSettings
from tests.fakes.api_server import DUO, WAYS, api, chat, hear
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Gates, Script

ALWAYS = replace(DUO, root_reserve_s=86_400.0)  # the first output that the root reads is enough
SCRIPTS = {"left": "it is 4", "root": Script("four and more", piece_words=1)}
CUT = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}
MESSAGES = chat()["messages"]


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_the_root_answers_without_what_has_no_time(way: tuple[str, bool]) -> None:
    moa = ScriptedMoa(SCRIPTS, pace=Gates("right").pace)
    async with api(moa, topologies=(ALWAYS,)) as served:
        heard = await hear(served, way, MESSAGES, model="duo")  # type: ignore[arg-type]
        assert heard.text == "four and more" and "length" not in heard.reason
        (warning,) = heard.warnings
        assert "without agent 'right': It was cut off" in warning
        assert moa.aborted == {"right"} and "it is 4" in moa.prompt_of("root")


@pytest.mark.parametrize(("begun", "text"), [(0, "it is 4"), (1, "four")])
@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_a_root_that_does_not_end_leaves_its_text_or_the_best_output(
    way: tuple[str, bool], begun: int, text: str
) -> None:
    gates = Gates("root")
    moa = ScriptedMoa(SCRIPTS, pace=lambda rid, piece: gates.pace(rid, piece - begun))
    async with api(moa, ApiSettings(request_timeout_s=0.7), topologies=(ALWAYS,)) as served:
        heard = await hear(served, way, MESSAGES, model="duo")  # type: ignore[arg-type]
        assert (heard.status, heard.text) == (200, text)
        assert heard.reason == CUT.get(way[0], "length")
        assert "The deadline" in heard.warnings[-1]
        assert not moa.running


async def test_agents_and_the_trace_say_what_the_deadline_cut_off() -> None:
    gates = Gates("right", "root")
    limits = ApiSettings(request_timeout_s=0.7)
    async with api(ScriptedMoa(SCRIPTS, pace=gates.pace), limits, topologies=(ALWAYS,)) as served:
        body = chat(include_agents=True, usage="root")
        _, answer = await served.post("/v1/chat/completions", body)
        _, trace = await served.get(f"/v1/traces/{answer['id'].removeprefix('chatcmpl-')}")
        states = {"left": "finished", "right": "deadline", "root": "deadline"}
        for described in (answer, trace):
            assert {name: one["state"] for name, one in described["agents"].items()} == states
        assert "cut off" in answer["agents"]["right"]["error"]
        left = answer["agents"]["left"]["completion_tokens"]
        assert answer["usage"]["completion_tokens"] == left  # it wrote the answer


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", ["fields", "fusion"])
async def test_a_panel_keeps_time_for_its_judge(way: tuple[str, bool], shape: str) -> None:
    moa = ScriptedMoa({"judge": "four"}, pace=Gates("panel-2").pace)
    panel = {"models": ["small", "medium"], "judge": "large", "root_reserve_s": 86_400}
    async with api(moa) as served:
        fields = panel if shape == "fields" else {"model": "fusion", "fusion": panel}
        heard = await hear(served, way, MESSAGES, **fields)  # type: ignore[arg-type]
        assert heard.text == "four" and "without agent 'panel-2'" in heard.warnings[0]
