"""The prompts of a batch, the gate that lets the aggregator be skipped, and the results."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import orjson

from shell_router.batch.journal import Key, Output, Role
from shell_router.batch.pool import Agreement, Pool, Sampling
from shell_router.batch.questions import Question, Questions, find_plurality
from shell_router.core.exact_json import Values, write_line
from shell_router.errors import DataError
from shell_router.topology.prompting import AGGREGATOR, fill_text, slot_parts

ROUNDING = 0.005
"""Slack of the gate, so that a tau of 0.67 means two of three."""

Outputs = Callable[[Key], Output | None]
"""A look-up of the outputs so far, as `Journal.get`."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPrompt:
    """A model's chat messages for one question, and SGLang's sampling parameters."""

    question: str
    role: Role
    model: str
    messages: Sequence[Mapping[str, str]]
    sampling: Values

    @property
    def key(self) -> Key:
        """The key of the prompt and of its output."""
        return self.question, self.role, self.model

    def fail(self, error: str) -> Output:
        """Return the output that says why there is no text."""
        return Output(*self.key, error=error)


def find_winner(
    answers: Sequence[str | None], probabilities: Sequence[float], measure: Agreement = "plurality"
) -> tuple[int | None, float]:
    """Return the index of an answer that most proposers give, and its confidence.

    By plurality the confidence is C = max_a |{i : a_i = a}| / k (MOSAIC, equation 11). By
    probability each proposer counts by the probability of its own answer. A proposer without an
    answer, None, agrees with none. The index is None if all are None.
    """
    winner = find_plurality(answers)
    weights = probabilities if measure == "probability" else [1.0] * len(answers)
    total = sum(weights)
    if winner is None or not total:
        return winner, 0.0
    agreeing = 0.0
    for answer, weight in zip(answers, weights, strict=True):
        if answer == answers[winner]:
            agreeing += weight
    return winner, agreeing / total


@dataclass(frozen=True, slots=True)
class GateResult:
    """The gate's view of a question: its proposers' outputs and the index of the winner.

    If it `passes`, the winner is the result, and no aggregator is needed.
    """

    outputs: Sequence[Output]
    winner: int | None
    confidence: float
    passes: bool

    @property
    def drafts(self) -> list[Output]:
        """The outputs without an error."""
        return [output for output in self.outputs if not output.error]


@dataclass(frozen=True, slots=True)
class Batch:
    """The questions for a pool and, per question id, its proposers.

    The aggregator reads the proposers' answers in this order.
    """

    pool: Pool
    questions: Questions
    proposers: Mapping[str, Sequence[str]]
    seed: int = 0

    def proposer_prompts(self) -> list[BatchPrompt]:
        """Build a prompt per question and proposer."""
        return [
            self._build_prompt(question, "proposer", proposer, question.text, self.pool.sampling)
            for question in self.questions.asked
            for proposer in self.proposers[question.id]
        ]

    def aggregator_prompts(self, outputs: Outputs) -> list[BatchPrompt]:
        """Build a prompt per question that does not pass the gate and has drafts.

        It is the default prompt of topologies.
        """
        aggregate = self.pool.aggregate
        assert aggregate is not None
        prompts = []
        for question in self.questions.asked:
            verdict = self.judge(question, outputs)
            if not verdict.passes and verdict.drafts:
                text = _insert_drafts(question, verdict.drafts)
                prompts.append(
                    self._build_prompt(
                        question, "aggregator", aggregate.model, text, aggregate.sampling
                    )
                )
        return prompts

    def judge(self, question: Question, outputs: Outputs) -> GateResult:
        """Apply the gate to the proposers' outputs; without an aggregator all questions pass it."""
        written: list[Output] = []
        answers: list[str | None] = []
        for proposer in self.proposers[question.id]:
            output = outputs((question.id, "proposer", proposer))
            if output is not None:
                written.append(output)
                answers.append(None if output.error else self.pool.answers.read(output.text))
        gate = self.pool.aggregate
        measure = gate.confidence if gate else "plurality"
        winner, confidence = find_winner(
            answers, [output.confidence for output in written], measure
        )
        passes = gate is None or (winner is not None and confidence >= gate.tau - ROUNDING)
        return GateResult(written, winner, confidence, passes)

    def _build_prompt(
        self, question: Question, role: Role, model: str, text: str, sampling: Sampling
    ) -> BatchPrompt:
        messages = [{"role": "user", "content": text}]
        system = self.pool.models[model].system
        if system:
            messages.insert(0, {"role": "system", "content": system})
        # 31 bits, SGLang's limit
        seed = zlib.crc32(f"{self.seed}/{question.id}/{role}/{model}".encode()) >> 1
        return BatchPrompt(question.id, role, model, messages, sampling.params(seed))


def _insert_drafts(question: Question, drafts: Sequence[Output]) -> str:
    parts = [fill_text(AGGREGATOR.prefix, question.text)]
    for index, draft in enumerate(drafts, 1):
        before, after = slot_parts(AGGREGATOR.slot, draft.model, index)
        parts += (before, draft.text, after)
    parts.append(fill_text(AGGREGATOR.suffix, question.text))
    return "".join(parts)


Source = Literal["proposers", "aggregator", "none"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposer's answer; None if its text has none. `right` is None if it is not known."""

    model: str
    answer: str | None
    confidence: float
    tokens: int
    right: bool | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a line.

    `by` says whose `text` it is. `winner` is the index in `proposals` of the plurality's answer;
    `confidence` is the gate's. `right` is None if the right answer is not known. `error` says why
    models did not answer. The tokens are those of all models that were asked.
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


def build_results(batch: Batch, outputs: Outputs) -> list[Result]:
    """Build a result per line that is not blank, in the file's order."""
    results = [_build_result(batch, question, outputs) for question in batch.questions.asked]
    results += [Result(line.line, line.id, error=line.error) for line in batch.questions.refused]
    return sorted(results, key=attrgetter("line"))


def as_lines(results: Sequence[Result]) -> bytes:
    """Return the results as JSONL."""
    return b"".join(map(write_line, results))


def read_results(folder: Path) -> list[Result]:
    """Read the results of a run that has ended. Raises DataError."""
    file = folder / "results.jsonl"
    try:
        return [_read_result(line) for line in file.read_bytes().splitlines()]
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}.", remedy="Name the folder of a run that has ended."
        ) from error
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{file} is not what a run writes: {error}.", remedy="Run it again."
        ) from error


def _read_result(line: bytes) -> Result:
    fields = orjson.loads(line)
    proposals = tuple(Proposal(**proposal) for proposal in fields.pop("proposals"))
    return Result(**fields, proposals=proposals)


def _build_result(batch: Batch, question: Question, outputs: Outputs) -> Result:
    verdict = batch.judge(question, outputs)
    errors = [f"{output.model}: {output.error}" for output in verdict.outputs if output.error]
    counted = list(verdict.outputs)
    by: Source = "none"
    text = ""
    aggregated = None
    if not verdict.passes and verdict.drafts and batch.pool.aggregate is not None:
        aggregated = outputs((question.id, "aggregator", batch.pool.aggregate.model))
        if aggregated is None or aggregated.error:
            reason = aggregated.error if aggregated else "it was not asked."
            errors.append(f"The aggregator did not answer: {reason}")
            aggregated = None
    if aggregated is not None:
        by = "aggregator"
        text = aggregated.text
        counted.append(aggregated)
    elif verdict.drafts:
        by = "proposers"
        winner = verdict.drafts[-1] if verdict.winner is None else verdict.outputs[verdict.winner]
        text = winner.text
    return Result(
        line=question.line,
        id=question.id,
        question=question.text,
        skills=sorted(question.skills),
        by=by,
        text=text,
        answer=batch.pool.answers.read(text),
        confidence=verdict.confidence,
        right=question.grade(text),
        winner=verdict.winner,
        proposals=tuple(_build_proposal(batch, question, output) for output in verdict.outputs),
        error=" ".join(errors),
        prompt_tokens=sum(output.prompt_tokens for output in counted),
        completion_tokens=sum(output.completion_tokens for output in counted),
    )


def _build_proposal(batch: Batch, question: Question, output: Output) -> Proposal:
    return Proposal(
        model=output.model,
        answer=batch.pool.answers.read(output.text),
        confidence=output.confidence,
        tokens=output.completion_tokens,
        right=None if output.error else question.grade(output.text),
        error=output.error,
    )
