"""Drafted decoding: a request may be drafted from its prompt, its output and further texts.

SGLang's NGRAM speculation drafts every request from one trie of all requests, and crashes on a
decode server. With VARIABLE its worker verifies what `Drafter` proposes for requests with
`custom_params: {"drafts": [[token id, ...]]}`; all others get one token per pass, as without
speculation. See docs/reference/sglang.md.
"""

import copy
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from shell_router.core.drafts import Drafter, DraftGate
from shell_router.sglang_plugin.compatibility import REQUEST, Feature
from shell_router.sglang_plugin.waiting_queue import world_size

logger = logging.getLogger(__name__)

VARIABLE: Final = "SHELL_ROUTER_DRAFTS"


def drafts_enabled(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment turns on drafts in servers with NGRAM speculation."""
    return variables.get(VARIABLE, "0") not in ("", "0")


@dataclass
class _Drafted:
    """A request's drafter, and the number of output tokens that it has seen."""

    drafter: Drafter
    seen: int = 0


class DraftedDecoding:
    """The hooks of one scheduler process, which has one NGRAM worker."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        ranks: Callable[[], int] = world_size,
        carried: Callable[[Any], Any] | None = None,
    ) -> None:
        self._clock = clock
        self._ranks = ranks
        self._carried = carried or make_next_input
        self._gate = DraftGate()
        self._requests: WeakKeyDictionary[Any, _Drafted | None] = WeakKeyDictionary()
        self._workers: dict[int, Any] = {}
        self._drafts: list[Sequence[int]] = []  # of the pass that runs, a row each
        self._sampler: Any = None
        self._logged: set[str] = set()

    def run(
        self, forward: Callable[..., Any], worker: Any, batch: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        """Run one pass, as wide as the drafts of its batch are worth.

        Runs around `NGRAMWorker.forward_batch_generation`.
        """
        if not batch.forward_mode.is_decode():
            result = forward(worker, batch, *arguments, **keywords)
        else:
            self._sampler = worker.model_runner.sampler
            self._drafts = [self._draft(request, worker, batch) for request in batch.reqs]
            width = self._choose_width(worker, batch)
            begin_s = self._clock()
            if width == 1:
                result = run_plain_pass(worker, batch)
            else:
                result = forward(self._resize_worker(worker, width), batch, *arguments, **keywords)
            self._gate.note(len(batch.reqs), width, self._clock() - begin_s)
            for request, draft in zip(batch.reqs, self._drafts, strict=True):
                if width == 1 or not draft:
                    request.spec_verify_ct -= 1  # SGLang counts every pass as one with drafts
        result.next_draft_input = self._carried(result.new_seq_lens)
        return result

    def make_chains(self, _prepare: Callable[..., Any], worker: Any, batch: Any) -> tuple[Any, Any]:
        """Return the draft tokens [rows * width] and their masks [rows * width * width].

        Runs instead of `NGRAMWorker._prepare_draft_tokens`. A row is its last token and the draft.
        Padding has no ancestors, so it is never accepted.
        """
        import numpy as np

        rows = len(batch.reqs)
        width = worker.draft_token_num
        tokens = np.zeros((rows, width), dtype=np.int64)
        masks = np.tile(np.eye(width, dtype=bool), (rows, 1, 1))
        for row, (request, draft) in enumerate(zip(batch.reqs, self._drafts, strict=True)):
            chain = (request.output_ids[-1], *draft[: width - 1])
            tokens[row, : len(chain)] = chain
            masks[row, : len(chain), : len(chain)] = np.tri(len(chain), dtype=bool)
        return tokens.ravel(), masks.ravel()

    def sample_and_compare(
        self,
        sample: Callable[..., Any],
        chains: Any,
        batch: Any,
        logits: Any,
        *arguments: Any,
        **keywords: Any,
    ) -> tuple[Any, Any, Any]:
        """Sample each token of the drafts on a CPU, where SGLang would verify all drafts greedily.

        Runs around `eagle_sample`. Each position is sampled as if it were decoded alone, and the
        draft goes on if it agrees, so outputs are distributed as in plain decoding. Returns the
        tokens [rows * width], how many count [rows], and their positions.
        """
        if logits.next_token_logits.device.type != "cpu" or not batch.spec_algorithm.is_ngram():
            return sample(chains, batch, logits, *arguments, **keywords)  # type: ignore[no-any-return]
        import torch

        rows = len(batch.reqs)
        width = chains.draft_token_num
        following = chains.draft_token.view(rows, width).roll(-1, dims=1)
        drafts = torch.tensor([min(len(draft), width - 1) for draft in self._drafts])
        sampled = torch.zeros(rows, width, dtype=torch.int32)
        accepted = torch.ones(rows, dtype=torch.int32)
        for place in range(width):
            step = logits.next_token_logits.view(rows, width, -1)[:, place]
            batch.sampling_info.apply_logits_bias(step)
            alone = replace(
                logits, next_token_logits=step.clone()
            )  # the sampler makes probabilities of it
            sampled[:, place] = self._sampler(
                alone, batch.sampling_info, False, None, None, batch.seq_lens + place
            )
            goes_on = (
                (accepted == place + 1)
                & (drafts > place)
                & (sampled[:, place] == following[:, place])
            )
            if not goes_on.any():
                break
            accepted += goes_on
        places = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
        return (
            sampled.flatten(),
            accepted,
            places.where(torch.arange(width) < accepted[:, None], -1),
        )

    def _draft(self, request: Any, worker: Any, batch: Any) -> Sequence[int]:
        drafted = self._find_drafted(request)
        if drafted is None:
            return ()
        new = request.output_ids[drafted.seen :]
        drafted.seen += len(new)
        drafted.drafter.extend(new)
        proposed = drafted.drafter.propose(worker.draft_token_num - 1)
        vocabulary = batch.model_config.vocab_size
        foreign = (
            at for at, token in enumerate(proposed) if not 0 <= token < vocabulary
        )  # ends the server
        return proposed[: next(foreign, len(proposed))]

    def _find_drafted(self, request: Any) -> _Drafted | None:
        if request not in self._requests:
            self._requests[request] = self._start_drafting(request)
        return self._requests[request]

    def _start_drafting(self, request: Any) -> _Drafted | None:
        own = request.sampling_params.custom_params
        if isinstance(own, dict):
            sources = own.get("drafts")
        else:
            sources = None
        if sources is None:
            return None
        if reason := find_obstacle(request, sources):
            if reason not in self._logged:
                self._logged.add(reason)
                logger.warning(
                    "Requests with %s are not drafted, although they ask for it.", reason
                )
            return None
        return _Drafted(Drafter(request.origin_input_ids_unpadded, sources))

    def _choose_width(self, worker: Any, batch: Any) -> int:
        widest = int(worker.draft_token_num)
        if not str(worker.device).startswith("cpu"):
            return widest  # the one width of which there are CUDA graphs
        if self._ranks() > 1:  # ranks measure times of their own, and must choose alike
            return 1
        sampling = batch.sampling_info  # what `sample_and_compare` leaves out
        if (
            batch.has_grammar
            # which releases before 0.5.21 lack, or one of them
            or getattr(sampling, "has_watermark_candidates", False)
            or getattr(sampling, "sampling_mask_batch_indices", None) is not None
        ):
            return 1
        drafts = [
            (len(draft), drafted.drafter.acceptance)
            for request, draft in zip(batch.reqs, self._drafts, strict=True)
            if draft and (drafted := self._requests[request])
        ]
        return min(widest, self._gate.width(len(batch.reqs), drafts))

    def _resize_worker(self, worker: Any, width: int) -> Any:
        """Return the worker with buffers of that width; all else is shared."""
        if width == worker.draft_token_num:
            return worker
        if width not in self._workers:
            made = self._workers[width] = copy.copy(worker)
            made.draft_token_num = made.speculative_num_draft_tokens = width
            made._init_preallocated_tensors()
        return self._workers[width]


def find_obstacle(request: Any, sources: Any) -> str | None:
    """Return the reason why this request is not drafted, or None.

    Drafts would change its output, or it is not known that they do not.
    """
    sampling = request.sampling_params
    lists = isinstance(sources, list) and all(
        isinstance(source, list) and all(type(token) is int for token in source)
        for source in sources
    )
    penalties = (
        sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
    )
    obstacles = {
        "drafts that are no lists of token ids": not lists,
        "penalties": penalties,
        "min_new_tokens": sampling.min_new_tokens > 0,
        "logit_bias": bool(sampling.logit_bias),
        "a grammar": request.grammar is not None,
        "a custom logit processor": request.custom_logit_processor is not None,
        "logprobs": request.return_logprob,
        "hidden states": request.return_hidden_states,
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


def run_plain_pass(worker: Any, batch: Any) -> Any:
    """Decode one token for each request, as a server without speculation does.

    SGLang restores the batch afterwards.
    """
    import torch

    lengths = batch.seq_lens
    last = [request.output_ids[-1] for request in batch.reqs]
    batch.input_ids = torch.tensor(last, dtype=torch.int64, device=lengths.device)
    batch.out_cache_loc = batch.req_to_token_pool.req_to_token[
        batch.req_pool_indices, lengths
    ].long()
    batch.seq_lens = lengths + 1
    batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    batch.orig_seq_lens = batch.seq_lens.int()
    batch.seq_lens_sum = batch.spec_info = None
    result = worker.target_worker.forward_batch_generation(batch)
    if batch.return_logprob:  # a list for each row, as after speculation
        output = result.logits_output
        output.next_token_logprobs = output.next_token_logprobs[:, None]
    result.speculative_num_draft_tokens = 1
    result.accept_lens = torch.ones_like(lengths, dtype=torch.int32)
    result.new_seq_lens = batch.seq_lens
    return result


def make_next_input(lengths: Any) -> Any:
    """Make the input that a batch carries to its next pass.

    No pass reads it; its rows have equal width, so that batches can be merged.
    """
    import torch
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    ones = torch.ones_like(lengths, dtype=torch.int32)
    return NgramVerifyInput(
        draft_token_num=1, new_seq_lens=lengths.clone(), accept_tokens=ones, accept_lens=ones
    )


def make_first_input(build: Callable[..., Any], algorithm: Any, batch: Any, *arguments: Any) -> Any:
    """Make the first input of a decode batch for NGRAM, for which SGLang makes none and crashes.

    Runs around `SpeculativeAlgorithm.build_disagg_draft_input`.
    """
    if algorithm.is_ngram():
        return make_next_input(batch.seq_lens)
    return build(algorithm, batch, *arguments)


def stay_in_place(move: Callable[..., Any], batch: Any, *arguments: Any, **keywords: Any) -> None:
    """Leave the KV of a chain where it is. Runs around `move_accept_tokens_to_target_kvcache`."""
    if not batch.spec_algorithm.is_ngram():
        move(batch, *arguments, **keywords)


def learn_nothing(_update: Callable[..., Any], _worker: Any, _batch: Any) -> None:
    """Add nothing to SGLang's trie. Runs around `NGRAMWorker._update_ngram_corpus`."""


def refuse_overlap(_made: None, worker: Any, *_arguments: Any, **_keywords: Any) -> None:
    """Raise RuntimeError for an overlap schedule: drafts need every token of the pass before.

    Runs after `NGRAMWorker.__init__`.
    """
    if worker.enable_overlap:
        raise RuntimeError(
            f"{VARIABLE} needs --disable-overlap-schedule: add it, or unset the variable."
        )


WORKER: Final = "sglang.srt.speculative.ngram_worker"
SAMPLING: Final = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"


def make_feature() -> Feature:
    """Return the hooks that let NGRAM speculation verify our drafts.

    They have no effect in a server without NGRAM speculation.
    """
    decoding = DraftedDecoding()
    worker = f"{WORKER}.NGRAMWorker"
    return Feature(
        hooks=(
            (f"{worker}.__init__", refuse_overlap, "AFTER"),
            (f"{worker}.forward_batch_generation", decoding.run, "AROUND"),
            (f"{worker}._prepare_draft_tokens", decoding.make_chains, "AROUND"),
            (f"{worker}._update_ngram_corpus", learn_nothing, "AROUND"),
            (
                "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input",
                make_first_input,
                "AROUND",
            ),
            (f"{WORKER}.move_accept_tokens_to_target_kvcache", stay_in_place, "AROUND"),
            (f"{WORKER}.eagle_sample", decoding.sample_and_compare, "AROUND"),
        ),
        needs=(
            f"{worker}.target_worker",
            f"{worker}._init_preallocated_tensors",
            f"{SAMPLING}.apply_logits_bias",
            "sglang.srt.speculative.ngram_info.NgramVerifyInput",
        ),
        sets={
            f"{worker}.__init__": (
                "draft_token_num",
                "enable_overlap",
                "model_runner",
                "speculative_num_draft_tokens",
            ),
            REQUEST: (
                *("origin_input_ids_unpadded", "output_ids", "sampling_params", "spec_verify_ct"),
                *("custom_logit_processor", "grammar", "return_hidden_states", "return_logprob"),
            ),
        },
    )
