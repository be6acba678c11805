"""The workers of a pair's two servers, where a request cannot even begin: it fails alone, and the rest goes on."""

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from shell_router.engines.embedded.causal_lm import CausalLm, load_causal_lm
from shell_router.engines.embedded.checkpoint import make_checkpoint
from shell_router.engines.embedded.decode_worker import DecodeJob, DecodeWorker
from shell_router.engines.embedded.kv_layers import SlotKv
from shell_router.engines.embedded.mailbox import Mailbox
from shell_router.engines.embedded.model_thread import ModelThread
from shell_router.engines.embedded.output import Output, Piece
from shell_router.engines.embedded.prefill_worker import Failed, Prefilled, PrefillJob, PrefillWorker
from shell_router.engines.embedded.radix import RadixCache
from shell_router.engines.embedded.sampler import Draw
from shell_router.engines.embedded.sampling_params import SamplingParams
from shell_router.engines.embedded.settings import EmbeddedSettings
from tests.fakes.merged_weights import one_thread

NO_ID = 2**70
"""No tensor holds it."""
TOO_MANY = 2**50
"""Tokens that no machine has memory for."""


@pytest.fixture(autouse=True)
def networks_run_on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> CausalLm:
    return load_causal_lm(EmbeddedSettings(str(make_checkpoint(tmp_path_factory.mktemp("model")))))


def prompt(ids: Sequence[int]) -> PrefillJob:
    draw = Draw(SamplingParams(temperature=0), ids, frozenset())
    return PrefillJob(ids, draw, False, None, asyncio.get_running_loop().create_future())


async def test_a_prompt_that_cannot_be_begun_fails_alone_and_keeps_nothing_in_the_cache(lm: CausalLm) -> None:
    worker = PrefillWorker(lm, RadixCache(1000), 100, random.Random(0))
    thread: ModelThread[PrefillJob, Prefilled | Failed] = ModelThread(
        worker, lambda job, one: job.outcome.set_result(one)
    )
    thread.start()
    good, bad, after = prompt([5, 6, 7, 8]), prompt([5, 6, 7, NO_ID]), prompt([5, 6, 7, 9])
    for job in (good, bad, after):
        thread.submit(job)
    try:
        async with asyncio.timeout(10):
            outcomes = [await job.outcome for job in (good, bad, after)]
    finally:
        await thread.stop()
    assert [type(one) for one in outcomes] == [Prefilled, Failed, Prefilled]
    worker.cache.clear()
    assert worker.cache.tokens == 0


def decoding(lm: CausalLm, room_tokens: int) -> DecodeJob:
    output = Output(Draw(SamplingParams(temperature=0), [5, 6], frozenset()), lm.tokenizer, max_new_tokens=4)
    return DecodeJob(torch.zeros_like(lm.kv_shape.empty(2)), 2, room_tokens, 7, None, output, False, Mailbox())


async def read(job: DecodeJob) -> list[Piece]:
    pieces: list[Piece] = []
    while not pieces or pieces[-1].finish_reason is None:
        pieces += await job.mailbox.take()
    return pieces


async def test_a_request_that_finds_no_memory_to_decode_in_fails_alone(lm: CausalLm) -> None:
    worker = DecodeWorker(lm, SlotKv(lm.kv_shape), random.Random(0))
    thread: ModelThread[DecodeJob, Piece] = ModelThread(worker, lambda job, piece: job.mailbox.put(piece))
    thread.start()
    jobs = [decoding(lm, room_tokens) for room_tokens in (6, TOO_MANY, 6)]
    for job in jobs:
        thread.submit(job)
    try:
        async with asyncio.timeout(10):
            first, failed, last = [await read(job) for job in jobs]
        assert thread.alive
    finally:
        await thread.stop()
    assert [piece.token_id for piece in first] == [piece.token_id for piece in last]
    reason = failed[-1].finish_reason
    assert reason is not None and (reason["type"], reason["status_code"]) == ("abort", 500)
    assert not worker.running
