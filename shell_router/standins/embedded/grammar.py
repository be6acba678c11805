"""Grammars that outputs must follow, by llguidance: compiled in a thread, kept, and read token by token."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shell_router.errors import InvalidRequest

if TYPE_CHECKING:
    from shell_router.standins.embedded.model import CausalLm

KEPT_GRAMMARS = 64
MOST_CHARACTERS = 2**18
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Else a small model may write white space without end."""


class Grammar:
    """One output's place in its grammar. `error` is why it cannot go on, empty while it can."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._read = 0
        self.error = ""

    def mask(self, logits: Tensor, output_ids: Sequence[int]) -> None:
        """Exclude from `logits` `[vocab]`, in place, what cannot follow `output_ids`, which only ever grow."""
        self._matcher.consume_tokens(list(output_ids[self._read :]))
        self._read = len(output_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            return
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)


class Grammars:
    """Those of one model; the last that were compiled are kept. One event loop only."""

    def __init__(self, lm: "CausalLm") -> None:
        self._lm = lm
        self._tokenizer: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._turn = asyncio.Lock()

    async def of(self, wanted: tuple[str, str] | None) -> Grammar | None:
        """A fresh one of the kind and text that `wanted` names. Raises InvalidRequest where it cannot be compiled."""
        if wanted is None:
            return None
        async with self._turn:  # one at a time: each may take a core for a second
            matcher = self._compiled.pop(wanted, None) or await asyncio.to_thread(self._compile, *wanted)
            self._compiled[wanted] = matcher
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return Grammar(matcher.deep_copy())

    def _compile(self, kind: str, text: str) -> Any:
        try:
            library = import_module("llguidance")
        except ImportError as error:
            raise InvalidRequest(
                f"The embedded engine has no {kind} without llguidance.", remedy="pip install 'shell-router[embedded]'."
            ) from error
        if len(text) > MOST_CHARACTERS:
            raise InvalidRequest(f"{kind} has over {MOST_CHARACTERS} characters.", remedy="Send a smaller one.")
        if not self._lm.eos_ids:
            raise InvalidRequest(
                f"{kind} needs a model that names a token to end with.",
                remedy="Set eos_token_id in the model's generation_config.json.",
            )
        if self._tokenizer is None:
            definition, ends = self._lm.tokenizer.to_str(), sorted(self._lm.eos_ids)
            self._tokenizer = library.LLTokenizer(definition, n_vocab=self._lm.vocab_size, eos_token=ends)
        matcher, problem = None, ""
        try:
            matcher = library.LLMatcher(self._tokenizer, _lark(library, kind, text), log_level=0)
            problem = matcher.get_error()
        except Exception as error:  # the library raises plain Exception
            problem = str(error)
        if problem:
            raise InvalidRequest(f"{kind} cannot be used: {problem.strip()}.", remedy="Correct or simplify it.")
        return matcher


def _lark(library: Any, kind: str, text: str) -> Any:
    if kind == "json_schema":
        return library.LLMatcher.grammar_from_json_schema(text, overrides=COMPACT)
    if kind == "regex":
        return library.LLMatcher.grammar_from_regex(text)
    return library.LLMatcher.grammar_from_lark(import_module("llguidance.gbnf_to_lark").any_to_lark(text))
