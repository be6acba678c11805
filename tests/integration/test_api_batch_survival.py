"""Batches whose router stops, whose time runs out, or whose disk is full: nothing that was answered
is lost.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from benchmarks.scripted.server import ScriptedSettings
from shell_router.config import BatchesSettings
from shell_router.engines.sglang import SglangPair
from shell_router.errors import EngineStalled
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.queue import QueueSettings
from tests.fakes.api_server import BatchApi, batch_api, chat, line, questions, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Gates, Script
from tests.fakes.scripted_pair import scripted_pool


def asked(moa: ScriptedMoa, model: str) -> int:
    """How many requests reached that model's engine."""
    return len(moa.engines[model].generated)


async def half_done(router: BatchApi, gates: Gates) -> str:
    """A batch whose small lines are answered, and whose medium ones run."""
    batch = await router.begin(*questions("small", "medium", "small", "medium"))
    await gates.until_waiting(2)
    await router.when(
        batch, lambda seen: seen.request_counts is not None and seen.request_counts.completed == 2
    )
    return batch.id


async def test_a_router_that_is_stopped_ends_its_lines_at_once_and_the_next_one_asks_only_the_rest(
    tmp_path: Path,
) -> None:
    gates = Gates("medium")
    moa = ScriptedMoa(pace=gates.pace)
    async with batch_api(tmp_path, moa) as router:
        id = await half_done(router, gates)
    assert not moa.running and moa.aborted == {"medium"}
    async with batch_api(tmp_path) as router:
        batch = await router.ended(await router.ai.batches.retrieve(id))
        assert batch.status == "completed" and set(await router.answers(batch)) == set("0123")
        assert (asked(router.served.moa, "small"), asked(router.served.moa, "medium")) == (0, 2)


async def test_a_router_that_was_killed_asks_only_the_rest_and_a_torn_line_again(
    tmp_path: Path,
) -> None:
    gates = Gates("medium")
    async with batch_api(tmp_path / "first", ScriptedMoa(pace=gates.pace)) as router:
        id = await half_done(router, gates)
        shutil.copytree(
            tmp_path / "first", tmp_path / "left"
        )  # what a kill would leave at this moment
    output = tmp_path / "left" / "files" / f"file-{id.removeprefix('batch_')}-output.jsonl"
    output.write_bytes(output.read_bytes()[:-9])
    async with batch_api(tmp_path / "left") as router:
        batch = await router.ended(await router.ai.batches.retrieve(id))
        assert batch.status == "completed" and set(await router.answers(batch)) == set("0123")
        assert (asked(router.served.moa, "small"), asked(router.served.moa, "medium")) == (1, 2)


async def test_a_batch_whose_window_has_passed_expires_with_what_was_answered(
    tmp_path: Path,
) -> None:
    gates = Gates("medium")
    async with batch_api(
        tmp_path, ScriptedMoa(pace=gates.pace), wall=lambda: time.time() - 86_401
    ) as router:
        id = await half_done(router, gates)
    async with batch_api(tmp_path) as router:
        batch = await router.ended(await router.ai.batches.retrieve(id))
        assert (
            batch.status == "expired"
            and batch.expired_at
            and set(await router.answers(batch)) == {"0", "2"}
        )
        errors = await router.results(batch.error_file_id)
        assert {name: one["error"]["code"] for name, one in errors.items()} == dict.fromkeys(
            "13", "batch_expired"
        )


async def test_a_batch_expires_while_its_lines_run(tmp_path: Path) -> None:
    gates = Gates("small")
    moa = ScriptedMoa(pace=gates.pace)
    clock = iter([0.0] * 3)  # the router's start, and when file and batch were made
    async with batch_api(tmp_path, moa, wall=lambda: next(clock, 3600 * 24 - 0.2)) as router:
        batch = await router.ended(await router.begin(line("a")))
        assert batch.status == "expired" and not moa.running


async def test_a_file_may_be_deleted_while_its_batch_runs(tmp_path: Path) -> None:
    gates = Gates("small")
    async with batch_api(tmp_path, ScriptedMoa(pace=gates.pace)) as router:
        batch = await router.begin(*questions("small", "small"))
        await gates.until_waiting(2)
        await router.ai.files.delete(batch.input_file_id)
    async with batch_api(tmp_path) as router:
        batch = await router.ended(batch)
        assert batch.status == "completed" and set(await router.answers(batch)) == set("01")
        with pytest.raises(openai.NotFoundError):
            await router.ai.files.retrieve(batch.input_file_id)
        await until(lambda: not list((tmp_path / "batches").glob("*.jsonl")))


async def test_the_deleted_input_of_a_batch_that_runs_counts_as_kept(tmp_path: Path) -> None:
    gates = Gates("small")
    quota = BatchesSettings(max_tenant_files=2)
    async with batch_api(tmp_path, ScriptedMoa(pace=gates.pace), batches=quota) as router:
        batch = await router.begin(line("a"))
        await gates.until_waiting(1)
        await router.ai.files.delete(batch.input_file_id)
        second = await router.upload(b"{}")
        with pytest.raises(openai.PermissionDeniedError, match="You keep 2 files"):
            await router.upload(b"{}")
        gates.open("small")
        await router.ended(batch)
        await router.ai.files.delete(second)
        await router.upload(b"{}")  # the batch's results count, its input does no more


@asynccontextmanager
async def on_one_pair(
    path: Path, concurrency: int = 32
) -> AsyncIterator[tuple[BatchApi, SglangPair]]:
    """A router whose `small` is a pair that runs 4 requests at once, and lets 2 wait."""
    scheduling = SchedulingSettings(queue=QueueSettings(max_running=4, max_waiting=2))
    moa = ScriptedMoa()
    async with scripted_pool(settings=ScriptedSettings(vocabulary=10, token_s=0.002)) as at:
        pair = SglangPair(*at.pool.fleet.addresses, scheduling=scheduling)
        moa.models["small"] = replace(moa.models["small"], engine=pair)
        batches = BatchesSettings(concurrency=concurrency)
        async with batch_api(path, moa, batches=batches) as router:
            yield router, pair
        await pair.aclose()


async def test_online_bursts_preempt_a_batch_and_each_line_is_answered_once_even_if_the_router_dies(
    tmp_path: Path,
) -> None:
    lines = [line(str(number), f"Ask {number}", max_tokens=20) for number in range(80)]
    async with on_one_pair(tmp_path / "first", concurrency=80) as (router, pair):
        decode = pair.fleet.dispatchers["decode"]
        batch = await router.begin(*lines)
        for least in (4, 1, 1, 1, 1):  # next to online requests the batch may have less room
            await until(lambda: decode.tracked[0].batch_load.running >= least)  # noqa: B023
            burst = [
                router.served.post("/v1/chat/completions", chat(model="small", max_tokens=10))
                for _ in range(4)
            ]
            assert {status for status, _ in await asyncio.gather(*burst)} == {200}
        await router.when(
            batch, lambda seen: bool(seen.request_counts and seen.request_counts.completed)
        )
        shutil.copytree(tmp_path / "first", tmp_path / "left")
        metrics = router.served.services.metrics.registry
        labels = {"model": "small"}
        preempted = metrics.get_sample_value("shell_router_batch_preemptions_total", labels)
        assert preempted is not None and preempted >= 5
        assert decode.waits.count == 0, "no online request waited"
        assert len(decode.batches.entries) > 40, "and the batch takes no place in their queue"
    async with on_one_pair(tmp_path / "left") as (router, _):
        ended = await router.ended(await router.ai.batches.retrieve(batch.id))
        assert ended.status == "completed" and len(await router.answers(ended)) == 80
        results = await router.results(ended.output_file_id)
        bodies = [result["response"]["body"] for result in results.values()]
        assert {body["usage"]["completion_tokens"] for body in bodies} == {20}


def break_output(folder: Path) -> None:
    """A full disk under the answers to come."""
    (batch,) = (folder / "batches").glob("batch_*.json")
    (folder / "files" / f"file-{batch.stem.removeprefix('batch_')}-output.jsonl").symlink_to(
        "/dev/full"
    )


def break_folder(folder: Path) -> None:
    """No folder for any file."""
    shutil.rmtree(folder / "files")


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [(break_output, "No space left on device"), (break_folder, "No such file or directory")],
)
async def test_a_batch_whose_answers_cannot_be_kept_fails_with_the_reason_and_runs_nothing_more(
    tmp_path: Path, break_it: Callable[[Path], None], reason: str
) -> None:
    gates = Gates("small", "medium")
    moa = ScriptedMoa(pace=gates.pace)
    async with batch_api(tmp_path, moa) as router:
        batch = await router.begin(*questions("small", "medium"))
        await gates.until_waiting(2)
        break_it(tmp_path)
        gates.open("small")
        batch = await router.ended(batch)
        assert (
            batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        )
        (fault,) = batch.errors.data
        assert fault.code == "storage_failed" and reason in (fault.message or "")
        assert not moa.running


async def test_what_was_answered_before_the_disk_was_full_can_be_read(tmp_path: Path) -> None:
    gates = Gates("medium")
    stalls = Script("a b", error=EngineStalled("nothing came"))
    async with batch_api(tmp_path, ScriptedMoa({"medium": stalls}, pace=gates.pace)) as router:
        batch = await router.ai.batches.retrieve(await half_done(router, gates))
        errors = tmp_path / "files" / f"file-{batch.id.removeprefix('batch_')}-errors.jsonl"
        errors.symlink_to("/dev/full")
        gates.open("medium")
        batch = await router.ended(batch)
        assert batch.status == "failed" and set(await router.answers(batch)) == {"0", "2"}
