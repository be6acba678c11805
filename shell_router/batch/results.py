"""What came out of a batch: one result per line of the questions' file; and what each tau would have skipped and lost.

MOSAIC fixes tau at 1 or 2/3 and leaves its choice open. Here every tau is judged on one run in which the aggregator
answered every question: no model is asked again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from shell_router.batch.journal import Output
from shell_router.batch.pool import ALWAYS, Agreement
from shell_router.batch.prompts import Batch, Judged, Outputs, Verdict, Vote, verdict_of
from shell_router.batch.questions import Question
from shell_router.core.statistics import Interval, paired_difference, wilson
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
        judged.verdict.confidence,
        question.grade(text),
        judged.verdict.winner,
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
    if judged.verdict.winner is not None:
        return judged.outputs[judged.verdict.winner], "proposers", error
    return (judged.drafts[-1], "proposers", error) if judged.drafts else (None, "none", error)


def _proposal(batch: Batch, question: Question, output: Output) -> Proposal:
    right = None if output.error else question.grade(output.text)
    answer = batch.pool.answers.read(output.text)
    return Proposal(output.model, answer, output.confidence, output.completion_tokens, right, output.error)


@dataclass(frozen=True, slots=True)
class Trial:
    """One tau on one run: the share of questions it skips the aggregator for, how right it is, and points lost."""

    tau: float
    skipped: float
    accuracy: Interval
    loss: Interval


def trials(results: Sequence[Result], confidence: Agreement | None = None) -> list[Trial]:
    """Every tau that makes a difference, the most cautious first; the first asks the aggregator always.

    Agreement is measured by `confidence`, plurality or probability, or as it was in the run. Questions on which the
    aggregator failed are left out. Raises DataError unless right answers are known, and the aggregator was asked
    wherever proposers answered.
    """
    graded = [result for result in results if result.right is not None and result.proposals]
    if any(result.by == "proposers" and not result.error for result in graded):
        raise DataError("The aggregator was not asked everything.", remedy="Run it with --tau 2, in the same folder.")
    known = [result for result in graded if result.by != "proposers"]
    if not known:
        raise DataError("No right answers are known in this run.", remedy="Run questions that have an answer.")
    verdicts = [_verdict(result, confidence) for result in known]
    taus = sorted({round(one.confidence, 4) for one in verdicts if one.winner is not None})
    return [_trial(tau, known, verdicts) for tau in (ALWAYS, *reversed(taus)) if tau > 0]


def _verdict(result: Result, measure: Agreement | None) -> Verdict:
    votes = [Vote(one.answer, one.confidence) for one in result.proposals]
    return Verdict(result.winner, verdict_of(votes, measure).confidence if measure else result.confidence)


def choose(tried: Sequence[Trial], bound: float) -> Trial:
    """The lowest tau that, with all above it, loses at most `bound` points."""
    chosen = tried[0]
    for trial in tried:
        if trial.loss.value > bound:
            break
        chosen = trial
    return chosen


def _trial(tau: float, results: Sequence[Result], verdicts: Sequence[Verdict]) -> Trial:
    skipped = [verdict.passes(tau) for verdict in verdicts]
    right = [
        bool(result.proposals[result.winner].right) if skip and result.winner is not None else bool(result.right)
        for result, skip in zip(results, skipped, strict=True)
    ]
    lost = paired_difference([float(bool(was.right)) - now for was, now in zip(results, right, strict=True)])
    points = Interval(*(100 * end for end in (lost.value, lost.low, lost.high)))
    return Trial(tau, sum(skipped) / len(skipped), wilson(sum(right) / len(right), len(right)), points)
