"""Drafted decoding writes what plain decoding writes, whatever is asked, and whether drafts are
right or wrong.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.core.drafts import DraftGate
from shell_router.standins.embedded.decode import DecodeJob, DecodeWorker
from shell_router.standins.embedded.kv_transfer import PrefilledKv
from shell_router.standins.embedded.model import CausalLm, PromptKv, SlotKv, load_causal_lm
from shell_router.standins.embedded.output import DecodedOutput, Piece
from shell_router.standins.embedded.sampling import BatchSampler
from shell_router.standins.embedded.service import Inflight
from shell_router.standins.embedded.settings import EmbeddedSettings
from shell_router.standins.embedded.wire import GenerateRequest, SamplingParams
from tests.fakes.tiny_models import one_thread

LENGTH = 24
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9] * 12, list(range(20, 50)), [30, 31]]
GREEDY = SamplingParams(top_k=1, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.7, sampling_seed=7, ignore_eos=True)


@pytest.fixture(autouse=True)
def networks_run_on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> CausalLm:
    """In float64, where an output does not depend on what is computed beside it."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"))
    return load_causal_lm(EmbeddedSettings(str(folder), dtype="float64"))


class AlwaysWide(DraftGate):
    """Verifies whatever is drafted."""

    def width(self, rows: int, drafts: Iterable[tuple[int, float]]) -> int:
        """16 where there is any draft."""
        return 16 if any(length for length, _ in drafts) else 1


def job_of(
    lm: CausalLm, ids: Sequence[int], params: SamplingParams, length: int, *, logprobs: bool
) -> DecodeJob:
    """A request whose prompt is prefilled, and whose first token is drawn."""
    request = GenerateRequest("r", tuple(ids), params, length, return_logprob=logprobs)
    output = DecodedOutput.of(request, lm)
    prompt = PromptKv(lm.kv_shape.empty(len(ids)))
    with torch.inference_mode():
        logits = lm.prefill(prompt, torch.tensor(ids), 0)
        ((token, chance),) = BatchSampler(
            [output.draw], with_logprobs=logprobs, rng=random.Random(0)
        )(logits)
    first = PrefilledKv(prompt.kv, cached_tokens=0, token_id=token, logprob=chance)
    return DecodeJob(Inflight(request), output, first)


def decoded(lm: CausalLm, gate: DraftGate, jobs: Sequence[DecodeJob]) -> list[list[Piece]]:
    """The pieces of each, which join the batch one after another."""
    worker = DecodeWorker(lm, SlotKv(lm.kv_shape), random.Random(1), gate=gate)
    found: dict[int, list[Piece]] = {id(job): [] for job in jobs}
    waiting, steps = list(jobs), 0
    with torch.inference_mode():
        while waiting or worker.busy:
            if waiting and steps % 2 == 0:
                worker.admit(waiting.pop(0))
            for job, piece in worker.step():
                found[id(job)].append(piece)
            steps += 1
    assert worker.running == 0
    return [found[id(job)] for job in jobs]


def plain(lm: CausalLm, params: SamplingParams, *, logprobs: bool = True) -> list[list[Piece]]:
    return decoded(
        lm, DraftGate(), [job_of(lm, ids, params, LENGTH, logprobs=logprobs) for ids in PROMPTS]
    )


def observed(pieces: Sequence[Piece]) -> tuple[list[int | None], str, Any]:
    """Ids, text and the reason of the end."""
    return (
        [piece.token_id for piece in pieces],
        "".join(piece.text for piece in pieces),
        pieces[-1].finish_reason,
    )


def ids_of(pieces: Sequence[Piece]) -> tuple[int, ...]:
    return tuple(piece.token_id for piece in pieces if piece.token_id is not None)


def half_right(ids: Sequence[int]) -> tuple[int, ...]:
    """A draft with a wrong token in it now and then."""
    return tuple(1 if place % 7 == 6 else token for place, token in enumerate(ids))


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SEEDED, id="sampled"),
        pytest.param(replace(SEEDED, top_p=0.8, top_k=20, min_p=0.01), id="truncated"),
        pytest.param(
            replace(SEEDED, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2),
            id="penalised",
        ),
        pytest.param(replace(GREEDY, repetition_penalty=1.3), id="greedy and penalised"),
        pytest.param(
            replace(
                SEEDED, ignore_eos=False, min_new_tokens=9, stop_token_ids=frozenset(range(40))
            ),
            id="eos",
        ),
        pytest.param(
            replace(SEEDED, logit_bias={17: 4.0}, stop=(" tower", " wei")),
            id="biased, with stop strings",
        ),
    ],
)
@pytest.mark.parametrize("corrupt", [tuple, half_right], ids=["right", "half right"])
def test_drafted_outputs_are_the_plain_ones(
    lm: CausalLm, params: SamplingParams, corrupt: Any
) -> None:
    wanted = plain(lm, params)
    sources = [
        (corrupt(ids_of(pieces)),)
        for pieces in plain(lm, replace(params, stop=(), ignore_eos=True))
    ]
    jobs = [
        job_of(lm, ids, replace(params, drafts=source), LENGTH, logprobs=True)
        for ids, source in zip(PROMPTS, sources, strict=True)
    ]
    found = decoded(lm, AlwaysWide(), jobs)
    assert [observed(pieces) for pieces in found] == [observed(pieces) for pieces in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [piece.logprob for piece in one] == pytest.approx([piece.logprob for piece in other])
    assert sum(piece.accepted for pieces in found for piece in pieces) > 0
    rejected = sum(piece.drafted - piece.accepted for pieces in found for piece in pieces)
    assert corrupt is tuple or rejected > 0


def test_a_right_draft_takes_fewer_passes_and_those_without_drafts_go_on_beside_it(
    lm: CausalLm,
) -> None:
    wanted = plain(lm, GREEDY, logprobs=False)
    drafting = replace(GREEDY, drafts=(ids_of(wanted[0]),))
    jobs = [
        job_of(lm, PROMPTS[0], drafting, LENGTH, logprobs=False),
        job_of(lm, PROMPTS[2], GREEDY, LENGTH, logprobs=False),
    ]
    worker = DecodeWorker(lm, SlotKv(lm.kv_shape), random.Random(1), gate=AlwaysWide())
    found: list[list[Piece]] = [[], []]
    ended_at: dict[int, int] = {}
    with torch.inference_mode():
        for job in jobs:
            worker.admit(job)
        for step in range(LENGTH + 1):
            for job, piece in worker.step():
                found[jobs.index(job)].append(piece)
                if piece.finish_reason:
                    ended_at[jobs.index(job)] = step
    assert [observed(pieces) for pieces in found] == [observed(wanted[0]), observed(wanted[2])]
    assert ended_at == {0: 2, 1: LENGTH - 1}, "23 drafted tokens in 2 passes, after the first token"


def test_without_a_seed_what_is_kept_follows_the_models_own_distribution(lm: CausalLm) -> None:
    """Of a first drafted token as many are kept as the model has it written there."""
    params = SamplingParams(temperature=1.0, top_k=4, ignore_eos=True)
    ids = PROMPTS[0]

    def second_tokens(drafts: tuple[tuple[int, ...], ...] | None, gate: DraftGate) -> list[int]:
        worker = DecodeWorker(lm, SlotKv(lm.kv_shape), random.Random(3), gate=gate)
        found: list[int] = []
        prefilled = job_of(lm, ids, replace(GREEDY, drafts=drafts), 3, logprobs=False)
        assert prefilled.prefilled is not None
        first = prefilled.prefilled
        with torch.inference_mode():
            for _ in range(200):
                request = GenerateRequest("r", tuple(ids), replace(params, drafts=drafts), 3)
                job = DecodeJob(
                    Inflight(request),
                    DecodedOutput.of(request, lm),
                    replace(first, kv=first.kv.clone()),
                )
                worker.admit(job)
                pieces: list[Piece] = []
                while worker.busy:
                    pieces += [piece for _, piece in worker.step()]
                found.append(ids_of(pieces)[1])
        return found

    wanted = second_tokens(None, DraftGate())
    likely = max(set(wanted), key=wanted.count)
    first = job_of(lm, ids, GREEDY, 3, logprobs=False).prefilled
    assert first is not None
    drafted = second_tokens(((first.token_id, likely, likely),), AlwaysWide())
    for token in set(wanted) | set(drafted):
        assert abs(wanted.count(token) - drafted.count(token)) < 5 * (2 * 200 * 0.25) ** 0.5


def test_tokens_after_an_early_end_are_not_counted_as_accepted(lm: CausalLm) -> None:
    full = ids_of(plain(lm, GREEDY, logprobs=False)[0])
    stopping = replace(
        GREEDY, ignore_eos=False, stop_token_ids=frozenset(full[5:6]), drafts=(full,)
    )
    (pieces,) = decoded(
        lm, AlwaysWide(), [job_of(lm, PROMPTS[0], stopping, LENGTH, logprobs=False)]
    )
    ids = ids_of(pieces)
    assert ids == full[: len(ids)] and len(ids) <= 6
    assert sum(piece.accepted for piece in pieces) < len(ids)


def test_drafts_never_go_beyond_the_length(lm: CausalLm) -> None:
    full = ids_of(plain(lm, GREEDY, logprobs=False)[0])
    for length in range(1, 20):
        job = job_of(lm, PROMPTS[0], replace(GREEDY, drafts=(full,)), length, logprobs=False)
        (pieces,) = decoded(lm, AlwaysWide(), [job])
        assert ids_of(pieces) == full[:length]
        assert pieces[-1].finish_reason == {"type": "length", "length": length}


def test_a_row_that_leaves_while_others_draft_changes_nothing_for_them(lm: CausalLm) -> None:
    wanted = plain(lm, SEEDED, logprobs=False)
    jobs = [
        job_of(
            lm, ids, replace(SEEDED, drafts=(half_right(ids_of(pieces)),)), LENGTH, logprobs=False
        )
        for ids, pieces in zip(PROMPTS, wanted, strict=True)
    ]
    worker = DecodeWorker(lm, SlotKv(lm.kv_shape), random.Random(1), gate=AlwaysWide())
    found: dict[int, list[Piece]] = {id(job): [] for job in jobs}
    with torch.inference_mode():
        for job in jobs:
            worker.admit(job)
        worker.step()
        worker.step()
        worker.drop(jobs[1])
        for job, piece in ((job, piece) for _ in range(LENGTH) for job, piece in worker.step()):
            found[id(job)].append(piece)
    for place in (0, 2, 3):
        later = ids_of(found[id(jobs[place])])
        assert ids_of(wanted[place])[-len(later) :] == later
    assert not worker.busy
