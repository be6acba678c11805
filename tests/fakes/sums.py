"""Scripted models that can add: each knows sums up to its own limit, and states the rest as 0."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson

from shell_router.core.generation import Generation
from shell_router.core.model import Tokenizer
from shell_router.engines.scripted import Script
from tests.fakes.moa import ScriptedMoa

Answer = Callable[[Generation], Script]


def write_sums(folder: Path, *sums: int) -> Path:
    """A file of questions with these sums as right answers."""
    file = folder / "sums.jsonl"
    lines = [
        {"question": f"What is {one - 1} + 1?", "answer": str(one), "parity": ("even", "odd")[one % 2]} for one in sums
    ]
    file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return file


def adding_moa(limits: Mapping[str, int]) -> ScriptedMoa:
    """Models that know sums up to `limits`; one that is not listed knows none."""
    moa = ScriptedMoa()
    for alias, engine in moa.engines.items():
        engine.answer = adding(moa.tokenizers[alias], limits.get(alias, -1))
    return moa


def adding(tokenizer: Tokenizer, limit: int) -> Answer:
    """Says the sum that the prompt asks for last."""

    def answer(request: Generation) -> Script:
        wanted = asked_sum(tokenizer, request)
        return Script(f"Let me think. Answer: {wanted if wanted <= limit else 0}")

    return answer


def asked_sum(tokenizer: Tokenizer, request: Generation) -> int:
    """The sum that is asked for; -1 for another question."""
    prompt = tokenizer.decode(request.input_ids)  # type: ignore[attr-defined] # a word tokenizer can
    found = re.findall(r"(\d+) \+ (\d+)", prompt)
    return sum(map(int, found[-1])) if found else -1
