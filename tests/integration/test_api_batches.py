"""Batches over a socket, by the official OpenAI client."""

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path

import openai
import pytest

from shell_router.api import ApiSettings
from shell_router.batch.questions import read_questions
from shell_router.config import BatchesSettings
from shell_router.errors import ConfigError, ShellRouterError
from shell_router.lab.batches import answer_online
from shell_router.lab.evaluation.client import RouterClient
from tests.fakes.api_server import (
    BatchApi,
    api,
    batch_api,
    chat,
    client,
    jsonl,
    line,
    questions,
    until,
)
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Gates

SMALL_SAYS = "small thinks and small speaks and then small is done"
KEYS = {"alice": "sk-a", "bob": "sk-b"}


def asked(moa: ScriptedMoa, model: str) -> int:
    """How many requests reached that model's engine."""
    return len(moa.engines[model].generated)


async def test_a_batch_over_models_and_topologies_is_answered_from_upload_to_content(
    tmp_path: Path,
) -> None:
    async with batch_api(tmp_path) as router:
        batch = await router.ai.batches.create(
            input_file_id=await router.upload(
                jsonl(line("a"), line("b", model="duo", include_agents=True))
            ),
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"for": "test"},
        )
        assert batch.status == "validating" and batch.expires_at == batch.created_at + 24 * 3600
        batch = await router.ended(batch)
        assert batch.status == "completed" and batch.metadata == {"for": "test"}
        assert batch.completed_at and batch.finalizing_at and batch.in_progress_at
        assert batch.request_counts is not None
        assert (
            batch.request_counts.total,
            batch.request_counts.completed,
            batch.request_counts.failed,
        ) == (2, 2, 0)
        assert batch.error_file_id is None and batch.errors is None
        results = await router.results(batch.output_file_id)
        assert results["a"]["response"]["status_code"] == 200 and results["a"]["error"] is None
        assert list(results["b"]["response"]["body"]["agents"]) == ["left", "right", "root"]
        assert (await router.answers(batch))["a"] == SMALL_SAYS
        assert [one.id async for one in router.ai.batches.list()] == [batch.id]


async def test_the_command_has_a_running_router_answer_a_file_and_goes_on_in_the_same_folder(
    tmp_path: Path,
) -> None:
    asked = tmp_path / "questions.jsonl"
    asked.write_bytes(jsonl({"question": "b?"}, {"question": "", "id": "bad"}, {"question": "a?"}))
    questions = read_questions(asked)
    said = list[str]()
    async with batch_api(tmp_path / "router") as router:
        begun = RouterClient(router.served.client, router.served.url)
        for _ in range(2):
            batch = await answer_online(begun, "duo", questions, tmp_path / "out", said.append)
            assert batch["status"] == "completed"
        assert said[-1] == "completed: 2 answered, 0 failed"
        assert len([one async for one in router.ai.batches.list()]) == 1
        lines = (tmp_path / "out" / "output.jsonl").read_text().splitlines()
        assert {json.loads(line)["custom_id"] for line in lines} == {"1", "3"}
        prompts = router.served.moa.prompts("small")
        assert [prompt[:8] for prompt in prompts] == ["<user>a?", "<user>b?"], "neighbors alike"
        with pytest.raises(ConfigError, match="Name another folder"):
            await answer_online(begun, "small", questions, tmp_path / "out", said.append)
        with pytest.raises(ShellRouterError, match="no batch"):
            begun_before = tmp_path / "out" / "batch.json"
            begun_before.write_bytes(jsonl(["batch_0", "duo", questions.fingerprint]))
            await answer_online(begun, "duo", questions, tmp_path / "out", said.append)


async def test_the_command_says_why_a_batch_was_not_completed_and_begins_another(
    tmp_path: Path,
) -> None:
    asked = tmp_path / "questions.jsonl"
    asked.write_bytes(jsonl({"question": "b?"}))
    questions, out = read_questions(asked), tmp_path / "out"
    gates = Gates("small")
    async with batch_api(tmp_path / "router", ScriptedMoa(pace=gates.pace)) as router:
        client = RouterClient(router.served.client, router.served.url)
        asking = asyncio.create_task(answer_online(client, "small", questions, out, print))
        await gates.until_waiting(1)
        (batch,) = [one async for one in router.ai.batches.list()]
        await router.ai.batches.cancel(batch.id)
        with pytest.raises(ShellRouterError, match=f"{batch.id} is cancelled"):
            await asking
        gates.open("small")
        assert (await answer_online(client, "small", questions, out, print))["id"] != batch.id


async def test_lines_of_a_busy_model_leave_others_their_places(tmp_path: Path) -> None:
    gates = Gates("small")
    batches = BatchesSettings(concurrency=2)
    async with batch_api(tmp_path, ScriptedMoa(pace=gates.pace), batches=batches) as router:
        busy = await router.begin(*questions(*6 * ["small"]))
        await gates.until_waiting(2)
        other = await router.ended(await router.begin(*questions(*6 * ["medium"])))
        assert other.status == "completed" and len(gates.waiting) == 2
        gates.open("small")
        assert (await router.ended(busy)).status == "completed"


async def test_a_line_is_answered_as_an_online_request_is(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        batch = await router.ended(await router.begin(line("a", seed=5, temperature=0.3)))
        status, online = await router.served.post(
            "/v1/chat/completions", chat(model="small", seed=5, temperature=0.3)
        )
        body = (await router.results(batch.output_file_id))["a"]["response"]["body"]
        own = {"id", "created", "usage"}  # the second one finds its prompt cached
        assert status == 200
        assert {name: body[name] for name in body.keys() - own} == {
            name: online[name] for name in online.keys() - own
        }
        first, second = router.served.moa.engines["small"].generated
        assert first.sampling == second.sampling and first.input_ids == second.input_ids
        trace = body["id"].removeprefix("chatcmpl-")
        assert (await router.served.get(f"/v1/traces/{trace}"))[0] == 200


async def test_a_bad_line_gets_an_error_of_its_own_and_the_rest_is_answered(tmp_path: Path) -> None:
    moa = ScriptedMoa(context_length=512)
    async with batch_api(tmp_path, moa) as router:
        marked = line("marked", "Judge [[lazyanswer:0]].")
        batch = await router.begin(
            line("good"),
            line("unknown", model="missing"),
            line("long", "word " * 999),
            line("tools", n=2),
            marked,
        )
        batch = await router.ended(batch)
        assert batch.status == "completed" and list(await router.answers(batch)) == ["good"]
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 4)
        errors = await router.results(batch.error_file_id)
        codes = {
            name: (
                one["response"]["status_code"],
                one["response"]["body"]["error"]["code"],
                one["error"],
            )
            for name, one in errors.items()
        }
        assert codes == {
            "unknown": (404, "model_not_found", None),
            "long": (400, "context_length_exceeded", None),
            "tools": (400, "invalid_field", None),
            "marked": (400, "invalid_field", None),
        }


async def test_an_input_with_a_wrong_line_fails_as_a_whole_and_names_every_such_line(
    tmp_path: Path,
) -> None:
    content = jsonl(line("a"), {**line("b"), "method": "GET"}, line("a")) + b"not json\n"
    async with batch_api(tmp_path) as router:
        batch = await router.ended(await router.begin_on(await router.upload(content)))
        assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
        assert batch.errors is not None and batch.errors.data is not None
        assert [(fault.line, fault.code, fault.param) for fault in batch.errors.data] == [
            (2, "invalid_method", "method"),
            (3, "duplicate_custom_id", "custom_id"),
            (4, "invalid_json_line", None),
        ]
        assert "stands on line 1 already" in (batch.errors.data[1].message or "")
        assert asked(router.served.moa, "small") == 0


async def test_a_cancelled_batch_leaves_nothing_running_and_keeps_its_answers(
    tmp_path: Path,
) -> None:
    gates = Gates("medium")
    moa = ScriptedMoa(pace=gates.pace)
    async with batch_api(tmp_path, moa) as router:
        batch = await router.begin(*questions("small", "medium", "small", "medium"))
        await gates.until_waiting(2)
        await router.when(
            batch,
            lambda seen: seen.request_counts is not None and seen.request_counts.completed == 2,
        )
        cancelling = await router.ai.batches.cancel(batch.id)
        assert cancelling.status == "cancelling" and cancelling.cancelling_at
        batch = await router.ended(batch)
        assert batch.status == "cancelled" and batch.cancelled_at
        assert not moa.running and moa.aborted == {"medium"}
        assert set(await router.answers(batch)) == {"0", "2"}
        errors = await router.results(batch.error_file_id)
        assert {name: one["error"]["code"] for name, one in errors.items()} == dict.fromkeys(
            "13", "batch_cancelled"
        )
        assert (await router.ai.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_that_has_ended_is_not_cancelled(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        batch = await router.ended(await router.begin(line("a")))
        with pytest.raises(openai.ConflictError, match="The batch is completed"):
            await router.ai.batches.cancel(batch.id)


async def test_two_batches_on_one_file_are_both_answered_and_share_the_room(tmp_path: Path) -> None:
    gates = Gates("small")
    async with batch_api(
        tmp_path, ScriptedMoa(pace=gates.pace), batches=BatchesSettings(concurrency=2)
    ) as router:
        file = await router.upload(jsonl(*questions(*["small"] * 5)))
        first, second = await router.begin_on(file), await router.begin_on(file)
        await gates.until_waiting(2)
        await router.when(second, lambda seen: seen.status == "in_progress")
        assert len(router.served.moa.running) == 2
        gates.open("small")
        for batch in (await router.ended(first), await router.ended(second)):
            assert batch.status == "completed" and set(await router.answers(batch)) == set("01234")


async def test_lines_keep_no_online_request_out(tmp_path: Path) -> None:
    gates = Gates("medium")
    async with batch_api(
        tmp_path, ScriptedMoa(pace=gates.pace), ApiSettings(max_running=1)
    ) as router:
        batch = await router.begin(*questions("medium", "medium", "medium"))
        await gates.until_waiting(3)
        assert (await router.served.post("/v1/chat/completions", chat(model="small")))[0] == 200
        gates.open("medium")
        assert (await router.ended(batch)).status == "completed"


async def test_tenants_see_and_touch_only_their_own(tmp_path: Path) -> None:
    async with batch_api(tmp_path, None, ApiSettings(keys=KEYS), key="sk-a") as alice:
        batch = await alice.ended(await alice.begin(line("a")))
        assert batch.output_file_id is not None
        async with client(alice.served, "sk-b") as bob:
            assert (
                [one async for one in bob.batches.list()]
                == [one async for one in bob.files.list()]
                == []
            )
            refused: list[Awaitable[object]] = [
                bob.batches.retrieve(batch.id),
                bob.batches.cancel(batch.id),
                bob.files.retrieve(batch.input_file_id),
                bob.files.content(batch.output_file_id),
                bob.files.delete(batch.output_file_id),
                BatchApi(alice.served, bob, tmp_path).begin_on(batch.input_file_id),
            ]
            for attempt in refused:
                with pytest.raises(openai.NotFoundError):
                    await attempt
        assert await alice.answers(batch) == {"a": SMALL_SAYS}


async def test_metrics_count_lines_and_batches(tmp_path: Path) -> None:
    gates = Gates("medium")
    async with batch_api(tmp_path, ScriptedMoa(pace=gates.pace)) as router:
        batch = await router.begin(line("a"), line("b", model="missing"), line("c", model="medium"))
        await gates.until_waiting(1)
        metrics = router.served.services.metrics
        await until(lambda: metrics.running_batch_lines._value.get() == 1)
        gates.open("medium")
        await router.ended(batch)
        async with router.served.client.get(f"{router.served.url}/metrics") as response:
            reported = await response.text()
        assert 'shell_router_batch_lines_total{outcome="completed"} 2.0' in reported
        assert 'shell_router_batch_lines_total{outcome="failed"} 1.0' in reported
        assert 'shell_router_batches_ended_total{status="completed"} 1.0' in reported


async def test_a_router_without_a_folder_says_how_to_get_one() -> None:
    async with api() as served, client(served, "none") as ai:
        for attempt in (
            ai.batches.list(),
            ai.files.list(),
            ai.files.create(file=b"{}", purpose="batch"),
        ):
            with pytest.raises(openai.NotFoundError, match=r"need a batches\.folder"):
                await attempt


async def test_the_example_of_the_docs_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "batch-a-file.md").read_text(
        encoding="utf-8"
    )
    example = page.partition("```python\n")[2].partition("```")[0]
    async with batch_api(tmp_path) as router:
        here = example.replace("http://127.0.0.1:8000", router.served.url).replace(
            "sleep(5)", "sleep(0)"
        )
        assert here.count(router.served.url) == here.count("sleep(0)") == 1
        await asyncio.to_thread(exec, here, {})
    reported = capsys.readouterr().out
    assert "completed BatchRequestCounts(completed=2, failed=0, total=2)" in reported
    assert f"first {SMALL_SAYS}" in reported and f"second {SMALL_SAYS}" in reported
