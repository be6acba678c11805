"""The workers of a pair's two servers, where a request cannot even begin: it fails alone, and the
rest goes on.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.standins.embedded.decode import DecodeJob, DecodeWorker
from shell_router.standins.embedded.kv_transfer import KvTransferError, PrefilledKv
from shell_router.standins.embedded.model import CausalLm, SlotKv, load_causal_lm
from shell_router.standins.embedded.output import DecodedOutput, Piece
from shell_router.standins.embedded.prefill import KvCache, PrefillJob, PrefillWorker
from shell_router.standins.embedded.sampling import Draw
from shell_router.standins.embedded.service import Inflight, ModelThread
from shell_router.standins.embedded.settings import EmbeddedSettings
from shell_router.standins.embedded.wire import GenerateRequest, SamplingParams
from tests.fakes.tiny_models import one_thread

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


def asked(lm: CausalLm, ids: Sequence[int], max_new_tokens: int) -> tuple[Inflight, DecodedOutput]:
    """A request for `new_tokens`, and its output, which is four of them."""
    request = GenerateRequest("r", tuple(ids), SamplingParams(temperature=0), max_new_tokens)
    draw = Draw(request.sampling, [5, 6], frozenset())
    return Inflight(request), DecodedOutput(draw, lm.tokenizer, max_new_tokens=4)


def prompt(lm: CausalLm, ids: Sequence[int]) -> PrefillJob:
    return PrefillJob(*asked(lm, ids, 4), asyncio.get_running_loop().create_future())


async def test_a_prompt_that_cannot_be_begun_fails_alone_and_keeps_nothing_in_the_cache(
    lm: CausalLm,
) -> None:
    worker = PrefillWorker(lm, KvCache(1000), 100, random.Random(0))
    outcomes: dict[PrefillJob, PrefilledKv | KvTransferError] = {}
    ended = asyncio.Event()

    def deliver(job: PrefillJob, outcome: PrefilledKv | KvTransferError) -> None:
        outcomes[job] = outcome
        if len(outcomes) == 3:
            ended.set()

    thread: ModelThread[PrefillJob, PrefilledKv | KvTransferError] = ModelThread(worker, deliver)
    good, bad, after = (prompt(lm, [5, 6, 7, last]) for last in (8, NO_ID, 9))
    for job in (good, bad, after):
        thread.submit(job)
    try:
        async with asyncio.timeout(10):
            await ended.wait()
    finally:
        await thread.stop()
    assert [type(outcomes[job]) for job in (good, bad, after)] == [
        PrefilledKv,
        KvTransferError,
        PrefilledKv,
    ]
    worker.cache.keep((1,) * 1000, lm.kv_shape.empty(1000))
    assert worker.cache.match((1,) * 1000) == 1000, "nothing is pinned any more"


def decoding(lm: CausalLm, room_tokens: int) -> DecodeJob:
    kv = torch.zeros_like(lm.kv_shape.empty(2))
    return DecodeJob(
        *asked(lm, [5, 6], room_tokens - 2),
        PrefilledKv(kv, cached_tokens=0, token_id=7, logprob=None),
    )


async def read(job: DecodeJob) -> list[Piece]:
    pieces: list[Piece] = []
    while not pieces or pieces[-1].finish_reason is None:
        pieces += await job.inflight.take()
    return pieces


async def test_a_request_that_finds_no_memory_to_decode_in_fails_alone(lm: CausalLm) -> None:
    worker = DecodeWorker(lm, SlotKv(lm.kv_shape), random.Random(0))
    thread: ModelThread[DecodeJob, Piece] = ModelThread(
        worker, lambda job, piece: job.inflight.put(piece)
    )
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
