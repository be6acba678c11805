"""Scripted models that can add, and evaluation records made by hand."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson

from shell_router.core.engine import Generation, Tokenizer
from shell_router.lab.evaluation.records import ExitRecord, Record, ReplyAgent
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

Answer = Callable[[Generation], Script]


def write_sums(folder: Path, *sums: int) -> Path:
    """A file of questions with these sums as right answers."""
    file = folder / "sums.jsonl"
    lines = [
        {
            "question": f"What is {one - 1} + 1?",
            "answer": str(one),
            "parity": ("even", "odd")[one % 2],
        }
        for one in sums
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


def agent(
    model: str = "small", state: str = "finished", tokens: int = 10, **fields: object
) -> ReplyAgent:
    """Build a record of an agent with 100 prompt tokens, 80 of them cached if it finished."""
    done = state == "finished"
    facts = {
        "agent": f"{model}-1",
        "layer": 0,
        "started": True,
        "prompt_tokens": 100 * done,
        "cached_tokens": 80 * done,
    }
    return ReplyAgent(model=model, state=state, completion_tokens=tokens, **(facts | fields))  # type: ignore[arg-type]


def judged(cluster: str, exited: bool, duration_s: float, layer: int = 0) -> ExitRecord:
    """Build a record of one judgement."""
    return ExitRecord(cluster, layer, exited, duration_s)


def record(
    setting: str, question: int, right: bool = True, latency_s: float = 1.0, **fields: object
) -> Record:
    """Build a record of one answer; `fields` are fields of Record."""
    facts: dict[str, object] = {
        "seed": 0,
        "stated": "1",
        "prompt_tokens": 100,
        "completion_tokens": 10,
    }
    return Record(question, setting=setting, right=right, latency_s=latency_s, **(facts | fields))  # type: ignore[arg-type]


def failed(
    setting: str, question: int, error: str = "The router answered 502: no engine"
) -> Record:
    """A request that got no answer."""
    return Record(question, 0, setting, right=False, stated=None, latency_s=0.0, error=error)
