"""What came out of a batch: one result per line of the questions' file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from shell_router.batch.journal import Output
from shell_router.batch.prompts import Batch, Judged, Outputs
from shell_router.batch.questions import Question
from shell_router.errors import DataError

Source = Literal["proposers", "aggregator", "none"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one proposer answered, None where nothing can be read from it; `right` is None where that is not known."""

    model: str
    answer: str | None
    confidence: float
    tokens: int
    right: bool | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A line's outcome. `by` says whose `text` it is; tokens are those of all the models that were asked.

    `confidence` is the gate's, `winner` the index in `proposals` of the plurality's answer. `right` is None where the
    right answer is not known; `error` is what kept models from answering.
    """

    line: int
    id: str | None
    question: str = ""
    skills: Sequence[str] = ()
    by: Source = "none"
    text: str = ""
    answer: str | None = None
    confidence: float = 0.0
    right: bool | None = None
    winner: int | None = None
    proposals: Sequence[Proposal] = ()
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def results_of(batch: Batch, outputs: Outputs) -> list[Result]:
    """One per line that is not blank, in the file's order."""
    found = [_result(batch, question, outputs) for question in batch.questions.asked]
    found += [Result(one.line, one.id, error=one.error) for one in batch.questions.refused]
    return sorted(found, key=lambda result: result.line)


def as_lines(results: Sequence[Result]) -> bytes:
    """The results as JSONL."""
    return b"".join(orjson.dumps(asdict(result)) + b"\n" for result in results)


def read_results(folder: Path) -> list[Result]:
    """The results of a run that has ended. Raises DataError."""
    file = folder / "results.jsonl"
    try:
        return [_read(line) for line in file.read_bytes().splitlines()]
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy="Name the folder of a run that has ended.") from error
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file} is not what a run writes: {error}.", remedy="Run it again.") from error


def _read(line: bytes) -> Result:
    found = orjson.loads(line)
    proposals = tuple(Proposal(**one) for one in found.pop("proposals"))
    return Result(**found, proposals=proposals)


def _result(batch: Batch, question: Question, outputs: Outputs) -> Result:
    judged = batch.judged(question, outputs)
    chosen, by, error = _chosen(batch, question, judged, outputs)
    text = chosen.text if chosen else ""
    written = [*judged.outputs, *([chosen] if chosen and by == "aggregator" else [])]
    return Result(
        question.line,
        question.id,
        question.text,
        sorted(question.skills),
        by,
        text,
        batch.pool.answers.read(text),
        judged.confidence,
        question.grade(text),
        judged.winner,
        tuple(_proposal(batch, question, output) for output in judged.outputs),
        " ".join([*(f"{one.model}: {one.error}" for one in judged.outputs if one.error), *error]),
        sum(output.prompt_tokens for output in written),
        sum(output.completion_tokens for output in written),
    )


def _chosen(
    batch: Batch, question: Question, judged: Judged, outputs: Outputs
) -> tuple[Output | None, Source, Sequence[str]]:
    """The output that counts, whose it is, and the error of an aggregator that failed."""
    error = []
    if not judged.passes and judged.drafts and batch.pool.aggregate is not None:
        output = outputs((question.id, "aggregator", batch.pool.aggregate.model))
        if output is not None and not output.error:
            return output, "aggregator", ()
        error = [f"The aggregator did not answer: {output.error if output else 'it was not asked.'}"]
    if judged.winner is not None:
        return judged.outputs[judged.winner], "proposers", error
    return (judged.drafts[-1], "proposers", error) if judged.drafts else (None, "none", error)


def _proposal(batch: Batch, question: Question, output: Output) -> Proposal:
    right = None if output.error else question.grade(output.text)
    answer = batch.pool.answers.read(output.text)
    return Proposal(output.model, answer, output.confidence, output.completion_tokens, right, output.error)
