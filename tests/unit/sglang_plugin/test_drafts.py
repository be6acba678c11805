"""Drafted decoding without SGLang: a short worker stands in for its NGRAM worker; tests/sglang has
the real one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shell_router.sglang_plugin.drafts import (
    VARIABLE,
    DraftedDecoding,
    drafts_enabled,
    find_obstacle,
    refuse_overlap,
    run_plain_pass,
    stay_in_place,
)

VOCABULARY = 50
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


@dataclass(eq=False)
class Request:
    """What the hooks read of SGLang's `Req`. Its model writes `plan`, token by token."""

    plan: Sequence[int]
    origin_input_ids_unpadded: Sequence[int] = (1, 2, *TEXT, 3)
    drafts: Any = ()
    output_ids: list[int] = field(default_factory=list)
    spec_verify_ct: int = 0
    grammar: Any = None
    custom_logit_processor: Any = None
    return_logprob: bool = False
    return_hidden_states: bool = False
    sampling_params: Any = None

    def __post_init__(self) -> None:
        self.output_ids = self.output_ids or [self.plan[0]]
        self.sampling_params = self.sampling_params or sampling(self.drafts)


def sampling(drafts: Any, **other: Any) -> SimpleNamespace:
    usual = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_new_tokens"), 0),
        **{"repetition_penalty": 1.0, "logit_bias": None},
    }
    asking = (
        None
        if drafts is None
        else {"drafts": list(drafts) if isinstance(drafts, tuple) else drafts}
    )
    return SimpleNamespace(custom_params=asking, **{**usual, **other})


@dataclass
class Logits:
    """SGLang's `LogitsProcessorOutput`."""

    next_token_logits: torch.Tensor
    next_token_logprobs: torch.Tensor | None = None


class Worker:
    """SGLang's NGRAM worker: `forward` computes what `make_chains` made of a batch, and
    `sample_and_compare` verifies it.
    """

    def __init__(self, decoding: DraftedDecoding, device: str = "cpu") -> None:
        self.decoding, self.device = decoding, device
        self.draft_token_num = self.speculative_num_draft_tokens = 16
        self.enable_overlap = False
        self.model_runner = SimpleNamespace(sampler=greedy)
        self.target_worker = SimpleNamespace(forward_batch_generation=self.alone)
        self.widths: list[int] = []
        self.drafted: list[list[list[int]]] = []

    def _init_preallocated_tensors(self) -> None:
        """Buffers are not needed here."""

    def alone(self, batch: Any) -> SimpleNamespace:
        assert batch.input_ids.tolist() == [request.output_ids[-1] for request in batch.reqs]
        assert batch.out_cache_loc.tolist() == [
            100 * row + int(length) for row, length in enumerate(batch.lengths)
        ]
        assert (
            batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == (batch.lengths + 1).tolist()
        )
        found = torch.tensor([request.plan[len(request.output_ids)] for request in batch.reqs])
        return SimpleNamespace(
            next_token_ids=found, logits_output=Logits(torch.zeros(1), torch.zeros(len(found)))
        )

    def forward(self, worker: Any, batch: Any) -> SimpleNamespace:
        tokens, masks = self.decoding.make_chains(lambda: None, worker, batch)
        rows, width = len(batch.reqs), worker.draft_token_num
        logits = torch.zeros(rows, width, VOCABULARY)
        for row, request in enumerate(batch.reqs):
            at = len(request.output_ids)
            for place in range(width):
                right = list(tokens.reshape(rows, width)[row, : place + 1]) == [
                    *request.plan[at - 1 : at + place]
                ]
                right = right and masks.reshape(rows, width, width)[row, place, : place + 1].all()
                logits[row, place, request.plan[at + place] if right else 0] = 1.0
        self.widths.append(width)
        self.drafted.append(tokens.reshape(rows, width).tolist())
        self.masks = masks.reshape(rows, width, width)
        chains = SimpleNamespace(draft_token_num=width, draft_token=torch.from_numpy(tokens))
        predicted, accepted, places = self.decoding.sample_and_compare(
            unexpected, chains, batch, Logits(logits.view(rows * width, VOCABULARY))
        )
        return SimpleNamespace(
            next_token_ids=predicted[places.long()].flatten(),
            accept_lens=accepted,
            speculative_num_draft_tokens=width,
            new_seq_lens=batch.seq_lens + accepted,
        )


def greedy(logits: Logits, _info: Any, *_others: Any) -> torch.Tensor:
    return logits.next_token_logits.argmax(-1)


def unexpected(*_arguments: Any, **_named: Any) -> Any:
    raise AssertionError("SGLang's own was called")


def batch_of(*requests: Request, **other: Any) -> Any:
    lengths = torch.tensor(
        [len(one.origin_input_ids_unpadded) + len(one.output_ids) - 1 for one in requests]
    )
    info = SimpleNamespace(
        sampling_mask_batch_indices=None,
        has_watermark_candidates=False,
        apply_logits_bias=lambda _: None,
    )
    usual = {
        "reqs": list(requests),
        "forward_mode": SimpleNamespace(is_decode=lambda: True),
        "spec_algorithm": SimpleNamespace(is_ngram=lambda: True),
        "model_config": SimpleNamespace(vocab_size=VOCABULARY),
        "sampling_info": info,
        "has_grammar": False,
        "return_logprob": False,
        "lengths": lengths,
        "seq_lens": lengths,
        "seq_lens_cpu": lengths,
        "req_pool_indices": torch.arange(len(requests)),
        "req_to_token_pool": SimpleNamespace(
            req_to_token=torch.arange(100 * len(requests)).view(-1, 100)
        ),
    }
    return SimpleNamespace(**{**usual, **other})


def ticking() -> Callable[[], float]:
    """A clock by which every pass takes equally long."""
    ticks = iter(range(10**6))
    return lambda: float(next(ticks))


def decoding(ranks: int = 1) -> DraftedDecoding:
    return DraftedDecoding(ticking(), lambda: ranks, lambda lengths: ("carried", lengths.tolist()))


def decode(worker: Worker, *requests: Request, passes: int, **other: Any) -> list[int]:
    """Run passes as SGLang's scheduler does; returns how many tokens each gave."""
    given = []
    for _ in range(passes):
        batch = batch_of(*requests, **other)
        result = worker.decoding.run(worker.forward, worker, batch)
        width, counts = result.speculative_num_draft_tokens, result.accept_lens.tolist()
        assert result.next_draft_input == ("carried", (batch.lengths + result.accept_lens).tolist())
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            request.output_ids += result.next_token_ids[row * width : row * width + count].tolist()
            request.spec_verify_ct += 1
        given.append(sum(counts))
    return given


def test_what_repeats_the_prompt_comes_in_few_passes_and_is_what_the_model_writes() -> None:
    request = Request([*TEXT, *range(20, 49)])
    worker = Worker(decoding())
    given = decode(worker, request, passes=12)
    assert request.output_ids == request.plan[: len(request.output_ids)]
    assert given[0] == 1, "a plain pass first, whose time is what drafts must beat"
    assert max(given) >= 4
    assert request.spec_verify_ct == len(worker.widths) < 12, "plain passes count no drafts"


def test_further_texts_are_drafted_from_too() -> None:
    text = [30, 31, 32, 33, 34, 35, 36, 37]
    request = Request([*text, *range(20, 29)], drafts=(text,))
    assert max(decode(Worker(decoding()), request, passes=4)) >= 4
    assert request.output_ids[:8] == text


def test_requests_that_do_not_ask_are_not_drafted_and_stay_right_next_to_those_that_do() -> None:
    asking, other = (
        Request([*TEXT, *range(20, 49)]),
        Request([*TEXT, *range(40, 10, -1)], drafts=None),
    )
    worker = Worker(decoding())
    decode(worker, asking, other, passes=8)
    assert asking.output_ids == asking.plan[: len(asking.output_ids)]
    assert other.output_ids == other.plan[:9], "one token per pass"
    assert other.spec_verify_ct == 0
    assert len(asking.output_ids) > 9
    assert not any(row[1] for _, row in worker.drafted)


def test_where_no_request_asks_every_pass_is_plain() -> None:
    worker = Worker(decoding())
    assert decode(worker, Request(TEXT, drafts=None), passes=8) == [1] * 8
    assert worker.widths == []


def test_a_draft_ends_before_a_token_that_the_model_does_not_have() -> None:
    request = Request([*TEXT, *range(20, 49)], (1, 2, *TEXT[:5], VOCABULARY, -7, 3))
    worker = Worker(decoding())
    decode(worker, request, passes=8)
    assert any(TEXT[4] in row for drafted in worker.drafted for row in drafted)
    assert all(
        0 <= token < VOCABULARY for drafted in worker.drafted for row in drafted for token in row
    )
    assert request.output_ids == request.plan[: len(request.output_ids)]


def test_padding_has_no_ancestors_and_a_draft_those_before_it() -> None:
    worker = Worker(decoding(), device="cuda:0")
    decode(worker, Request([30, 31, 32, 33, 20, 21], (1, 2), drafts=([30, 31, 32, 33],)), passes=1)
    assert worker.drafted == [[[30, 31, 32, 33, *[0] * 12]]]
    mask = worker.masks[0]
    assert (mask[:4, :4] == torch.ones(4, 4).tril().bool().numpy()).all()
    assert not mask[:4, 4:].any()
    assert (mask[4:] == torch.eye(16).bool().numpy()[4:]).all()


def test_padding_is_not_taken_for_a_draft_that_is_right() -> None:
    """Rows are padded with token 0, which this model writes after the draft."""
    text = [30, 31, 32, 33]
    request = Request([*text, 0, 20, 21, 22, 23, 24], (1, 2), drafts=(text,))
    given = decode(Worker(decoding(), device="cuda:0"), request, passes=4)
    assert given[0] == 4
    assert request.output_ids == request.plan[: len(request.output_ids)]


def test_each_place_is_sampled_as_if_it_were_decoded_alone() -> None:
    """By position, as seeds do; the first place that the sampler decides otherwise ends the
    pass."""
    request = Request([*TEXT, *range(20, 49)])
    worker = Worker(decoding())
    seen = []

    def contrary(
        logits: Logits, _info: Any, _logprob: Any, _top: Any, _ids: Any, positions: torch.Tensor
    ) -> Any:
        seen.append(positions.tolist())
        token = logits.next_token_logits.argmax(-1)
        return torch.where(positions == 15, 49, token)

    worker.model_runner.sampler = contrary
    decode(worker, request, passes=3)
    assert request.output_ids[:4] == [*TEXT[:3], 49]
    assert [at for (at,) in seen][:2] == [14, 15], (
        "the prompt has 13 tokens, and the plain pass one"
    )


@pytest.mark.parametrize("other", [{"has_grammar": True}, {"ranks": 2}])
def test_batches_that_cannot_be_verified_are_decoded_plainly(other: dict[str, Any]) -> None:
    worker = Worker(decoding(other.pop("ranks", 1)))
    assert decode(worker, Request([*TEXT, *range(20, 49)]), passes=6, **other) == [1] * 6


def test_with_an_accelerator_every_pass_has_the_width_of_its_graphs_and_sglang_verifies() -> None:
    worker = Worker(decoding(ranks=2), device="cuda:0")
    decode(worker, Request([*TEXT, *range(20, 49)]), passes=3)
    assert worker.widths == [16, 16, 16]
    found = worker.decoding.sample_and_compare(
        lambda *arguments: "SGLang's own", None, batch_of(), Logits(torch.zeros(1, device="meta"))
    )
    assert found == "SGLang's own"


def test_logprobs_of_a_plain_pass_are_a_list_for_each_row() -> None:
    batch = batch_of(Request(TEXT), Request(TEXT), return_logprob=True)
    assert run_plain_pass(Worker(decoding()), batch).logits_output.next_token_logprobs.shape == (
        2,
        1,
    )


def test_prefill_is_sglangs_own() -> None:
    result = SimpleNamespace(new_seq_lens=torch.tensor([3]))
    batch = batch_of(forward_mode=SimpleNamespace(is_decode=lambda: False))
    assert decoding().run(lambda *_: result, None, batch) is result
    assert result.next_draft_input == ("carried", [3])


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(TEXT, sampling_params=sampling([], presence_penalty=0.5)), "penalties"),
        (Request(TEXT, sampling_params=sampling([], repetition_penalty=1.1)), "penalties"),
        (Request(TEXT, sampling_params=sampling([], min_new_tokens=4)), "min_new_tokens"),
        (Request(TEXT, sampling_params=sampling([], logit_bias={"3": 1.0})), "logit_bias"),
        (Request(TEXT, grammar=object()), "a grammar"),
        (Request(TEXT, custom_logit_processor="x"), "a custom logit processor"),
        (Request(TEXT, return_logprob=True), "logprobs"),
        (Request(TEXT, return_hidden_states=True), "hidden states"),
        (Request(TEXT, drafts=[["a"]]), "drafts that are no lists of token ids"),
        (Request(TEXT, drafts=[[True]]), "drafts that are no lists of token ids"),
        (Request(TEXT, drafts="text"), "drafts that are no lists of token ids"),
    ],
)
def test_requests_that_drafts_might_change_are_not_drafted_and_it_is_said_once(
    request_: Request, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(decoding())
    assert find_obstacle(request_, request_.sampling_params.custom_params["drafts"]) == reason
    another = replace(request_, output_ids=[])
    assert decode(worker, request_, another, passes=5) == [2] * 5
    assert [record.getMessage() for record in caplog.records].count(
        f"Requests with {reason} are not drafted, although they ask for it."
    ) == 1


def test_other_speculation_is_left_alone() -> None:
    moved = []
    other = batch_of(spec_algorithm=SimpleNamespace(is_ngram=lambda: False))
    stay_in_place(lambda *arguments: moved.append(arguments), other, 1)
    stay_in_place(unexpected, batch_of(), 1)
    assert moved == [(other, 1)]
    assert (
        decoding().sample_and_compare(lambda *_: "own", None, other, Logits(torch.zeros(1)))
        == "own"
    )


def test_overlap_is_refused_with_the_remedy() -> None:
    refuse_overlap(None, SimpleNamespace(enable_overlap=False))
    with pytest.raises(RuntimeError, match="--disable-overlap-schedule"):
        refuse_overlap(None, SimpleNamespace(enable_overlap=True))


@pytest.mark.parametrize(
    ("variables", "on"), [({}, False), ({VARIABLE: "0"}, False), ({VARIABLE: "1"}, True)]
)
def test_it_is_asked_for_by_a_variable(variables: dict[str, str], on: bool) -> None:
    assert drafts_enabled(variables) is on


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
