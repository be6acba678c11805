"""Sampling for a batch by each request's parameters, and the grammars that outputs follow.

Grammars are llguidance's: compiled in a thread, kept, and read token by token.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from shell_router.errors import InvalidRequest
from shell_router.standins.embedded.model import CausalLm
from shell_router.standins.embedded.wire import WHOLE_VOCABULARY, SamplingParams

KEPT_GRAMMARS = 64
MOST_CHARACTERS = 2**18
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Else a small model may write white space without end."""


class Grammar:
    """One output's state in its grammar. `error` is why it cannot go on, empty while it can."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._read = 0
        self.error = ""

    def mask(self, logits: Tensor, output_ids: Sequence[int]) -> None:
        """Exclude from `logits` `[vocab]`, in place, the tokens that cannot follow `output_ids`.

        Each call's `output_ids` begin with those of the call before.
        """
        self._matcher.consume_tokens(list(output_ids[self._read :]))
        self._read = len(output_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            return
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)


class Grammars:
    """The grammars of one model; the last that were compiled are kept. One event loop only."""

    def __init__(self, lm: CausalLm) -> None:
        self._lm = lm
        self._tokenizer: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._turn = asyncio.Lock()

    async def of(self, spec: tuple[str, str] | None) -> Grammar | None:
        """Return a new state of the grammar, given by kind and text; None without one.

        Raises InvalidRequest if it cannot be compiled.
        """
        if spec is None:
            return None
        async with self._turn:  # one at a time: each may take a core for a second
            matcher = self._compiled.pop(spec, None) or await asyncio.to_thread(
                self._compile, *spec
            )
            self._compiled[spec] = matcher
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return Grammar(matcher.deep_copy())

    def _compile(self, kind: str, text: str) -> Any:
        try:
            library = import_module("llguidance")
        except ImportError as error:
            raise InvalidRequest(
                f"The embedded engine has no {kind} without llguidance.",
                remedy="pip install 'shell-router[embedded]'.",
            ) from error
        if len(text) > MOST_CHARACTERS:
            raise InvalidRequest(
                f"{kind} has over {MOST_CHARACTERS} characters.", remedy="Send a smaller one."
            )
        if not self._lm.eos_ids:
            raise InvalidRequest(
                f"{kind} needs a model that names a token to end with.",
                remedy="Set eos_token_id in the model's generation_config.json.",
            )
        if self._tokenizer is None:
            definition = self._lm.tokenizer.to_str()
            ends = sorted(self._lm.eos_ids)
            self._tokenizer = library.LLTokenizer(
                definition, n_vocab=self._lm.vocab_size, eos_token=ends
            )
        matcher = None
        problem = ""
        try:
            matcher = library.LLMatcher(self._tokenizer, _lark(library, kind, text), log_level=0)
            problem = matcher.get_error()
        except Exception as error:  # the library raises plain Exception
            problem = str(error)
        if problem:
            raise InvalidRequest(
                f"{kind} cannot be used: {problem.strip()}.", remedy="Correct or simplify it."
            )
        return matcher


def _lark(library: Any, kind: str, text: str) -> Any:
    if kind == "json_schema":
        return library.LLMatcher.grammar_from_json_schema(text, overrides=COMPACT)
    if kind == "regex":
        return library.LLMatcher.grammar_from_regex(text)
    return library.LLMatcher.grammar_from_lark(
        import_module("llguidance.gbnf_to_lark").any_to_lark(text)
    )


@dataclass(slots=True)
class Draw:
    """The sampling state of one request: its parameters, prompt and output."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    stop_ids: frozenset[int]
    output_ids: list[int] = field(default_factory=list)
    grammar: Grammar | None = None

    @property
    def position(self) -> int:
        """The number of output tokens."""
        return len(self.output_ids)

    def after(self, tokens: Sequence[int]) -> Self:
        """Return the same request as if it had written these `tokens`, too."""
        if tokens:
            return replace(self, output_ids=[*self.output_ids, *tokens])
        return self

    def uniform(self, rng: random.Random) -> float:
        """Return a number in [0, 1): from `rng`, or fixed by seed and position."""
        if self.params.sampling_seed is None:
            return rng.random()
        return random.Random(f"{self.params.sampling_seed}/{self.position}").random()


Drawn = tuple[int, float | None]
"""A token, and its log-probability where that is asked for."""


class BatchSampler:
    """A sampler for one fixed batch of requests; build another when the batch changes.

    A call takes logits `[batch, vocab]` and returns a token for each row, with its log-probability
    if `with_logprobs`.
    """

    def __init__(self, draws: Sequence[Draw], *, with_logprobs: bool, rng: random.Random) -> None:
        self._draws = draws
        self._with_logprobs = with_logprobs
        self._rng = rng
        self._shaped = [row for row, draw in enumerate(draws) if draw.params.shapes_logits]
        self._random = [row for row, draw in enumerate(draws) if not draw.params.greedy]
        self._temperature = _column([draw.params.temperature for draw in draws])
        params = [draws[row].params for row in self._random]
        self._truncated = any(
            each.top_k < WHOLE_VOCABULARY or each.top_p < 1.0 or each.min_p > 0.0 for each in params
        )
        self._top_k = torch.tensor([[each.top_k] for each in params])
        self._top_p = _column([each.top_p for each in params])
        self._min_p = _column([each.min_p for each in params])

    def __call__(self, logits: Tensor) -> list[Drawn]:
        """Draw a token for each row of `logits` `[batch, vocab]`."""
        logits = _widen(logits)
        if self._shaped:
            logits = logits.clone()
            for row in self._shaped:
                shape_logits(logits[row], self._draws[row])
        tokens = logits.argmax(-1)
        if self._random:
            logits = logits / self._temperature.to(logits)
            tokens[self._random] = self._sample(logits[self._random])
        logprobs: Sequence[float | None] = [None] * len(tokens)
        if self._with_logprobs:
            logprobs = token_logprobs(logits, tokens)
        return list(zip(tokens.tolist(), logprobs, strict=True))

    def _sample(self, logits: Tensor) -> Tensor:
        uniforms = _column([self._draws[row].uniform(self._rng) for row in self._random]).to(logits)
        probabilities = torch.softmax(logits, -1)
        if self._truncated:
            weights = self._truncate(probabilities)
        else:
            weights = probabilities
        return _invert(weights, uniforms).squeeze(-1)

    def _truncate(self, probabilities: Tensor) -> Tensor:
        """Set what top-k, top-p and min-p exclude to zero.

        The order of tokens stays, so a row's draw does not depend on other rows.
        """
        ordered, order = probabilities.sort(dim=-1, descending=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        before = ordered.cumsum(-1) - ordered
        excluded = rank >= self._top_k.to(rank)
        excluded |= (before > self._top_p.to(ordered)) & (self._top_p.to(ordered) < 1)
        excluded |= ordered < ordered[:, :1] * self._min_p.to(ordered)
        return probabilities.masked_fill(
            torch.empty_like(excluded).scatter_(-1, order, excluded), 0.0
        )


def shape_logits(logits: Tensor, draw: Draw) -> None:
    """Apply bias, penalties and the grammar to one request's `logits` `[vocab]` in place.

    Frequency and presence count output tokens; repetition counts prompt and output, as in SGLang.
    """
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*draw.prompt_ids, *draw.output_ids}), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if draw.output_ids and (params.frequency_penalty or params.presence_penalty):
        counts = torch.bincount(
            torch.tensor(draw.output_ids, device=logits.device), minlength=logits.shape[-1]
        )
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if draw.position < params.min_new_tokens and draw.stop_ids:
        logits[sorted(draw.stop_ids)] = -torch.inf
    if draw.grammar is not None:
        draw.grammar.mask(logits, draw.output_ids)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw indices `[batch, 1]` in proportion to `weights` `[batch, n]`, which need no sum of 1."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # below the total even where the product rounds up to it, so that what is picked has a weight
    masses = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    # where weights are NaN, as of a bias that is infinite in this dtype, some token that exists
    return torch.searchsorted(cumulative, masses, right=True).clamp_(max=weights.shape[-1] - 1)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def token_logprobs(logits: Tensor, tokens: Tensor) -> list[float]:
    """Return the log-probability of each of `tokens` `[n]` by its row of `logits` `[n, vocab]`."""
    logits = _widen(logits)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    logprobs: list[float] = (chosen - logits.logsumexp(-1)).tolist()
    return logprobs


def _widen(logits: Tensor) -> Tensor:
    if logits.dtype == torch.bfloat16:
        return logits.float()
    return logits
