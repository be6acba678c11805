"""What came out of a batch: one result per line of the questions' file."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from shell_router.batch.asking import Batch, Judged, Outputs
from shell_router.batch.journal import Output
from shell_router.batch.questions import Question, Refused
from shell_router.core.grading import is_right
from shell_router.errors import DataError

Source = Literal["experts", "aggregator", "nobody"]


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one expert answered, None where nothing can be read from it; `right` is None where that is not known."""

    model: str
    answer: str | None
    confidence: float
    tokens: int
    right: bool | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A line's outcome. `by` says whose `text` it is; tokens are those of all the models that were asked.

    `confidence` is the gate's, `winner` the place in `experts` of the plurality's answer. `right` is None where the
    right answer is not known; `error` is what kept models from answering, if anything did.
    """

    line: int
    id: str | None
    question: str = ""
    skills: Sequence[str] = ()
    by: Source = "nobody"
    text: str = ""
    answer: str | None = None
    confidence: float = 0.0
    right: bool | None = None
    winner: int | None = None
    experts: Sequence[Opinion] = ()
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def results_of(batch: Batch, refused: Sequence[Refused], outputs: Outputs) -> list[Result]:
    """One per line that is not blank, in the file's order."""
    found = [_result(batch, question, outputs) for question in batch.questions]
    found += [Result(one.line, one.id, error=one.error) for one in refused]
    return sorted(found, key=lambda result: result.line)


def as_lines(results: Sequence[Result]) -> bytes:
    """The results as JSONL."""
    return b"".join(orjson.dumps(asdict(result)) + b"\n" for result in results)


def read_results(folder: Path) -> list[Result]:
    """The results of a run that has ended. Raises DataError."""
    file = folder / "results.jsonl"
    try:
        return list(_read(file.read_bytes()))
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy="Name the folder of a run that has ended.") from error
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file} is not what a run writes: {error}.", remedy="Run it again.") from error


def _read(content: bytes) -> Iterator[Result]:
    for line in content.splitlines():
        found = orjson.loads(line)
        experts = tuple(Opinion(**expert) for expert in found.pop("experts"))
        yield Result(**found, experts=experts)


def _result(batch: Batch, question: Question, outputs: Outputs) -> Result:
    judged = batch.judged(question, outputs)
    said, by, error = _said(batch, question, judged, outputs)
    text = said.text if said else ""
    written = [*judged.outputs, *([said] if said and by == "aggregator" else [])]
    return Result(
        question.line,
        question.id,
        question.text,
        sorted(question.skills),
        by,
        text,
        batch.extract(text),
        judged.verdict.confidence,
        _right(question, text),
        judged.verdict.winner,
        tuple(_opinion(batch, question, output) for output in judged.outputs),
        " ".join([*(f"{one.model}: {one.error}" for one in judged.outputs if one.error), *error]),
        sum(output.prompt_tokens for output in written),
        sum(output.completion_tokens for output in written),
    )


def _said(
    batch: Batch, question: Question, judged: Judged, outputs: Outputs
) -> tuple[Output | None, Source, Sequence[str]]:
    """The output that counts, whose it is, and what is wrong with that: an aggregator that failed is told."""
    error = []
    if not judged.passes and judged.drafts and batch.aggregating is not None:
        output = outputs((question.id, "aggregator", batch.aggregating.model))
        if output is not None and not output.error:
            return output, "aggregator", ()
        error = [f"The aggregator did not answer: {output.error if output else 'it was not asked.'}"]
    if judged.verdict.winner is not None:
        return judged.outputs[judged.verdict.winner], "experts", error
    return (judged.drafts[-1], "experts", error) if judged.drafts else (None, "nobody", error)


def _opinion(batch: Batch, question: Question, output: Output) -> Opinion:
    return Opinion(
        output.model,
        batch.extract(output.text),
        output.confidence,
        output.completion_tokens,
        None if output.error else _right(question, output.text),
        output.error,
    )


def _right(question: Question, text: str) -> bool | None:
    if question.answer is None or question.grader is None:
        return None
    return is_right(text, question.answer, question.grader)
