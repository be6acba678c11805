"""What the models of a batch are asked, whether they agree so well that no aggregator is, and what
came of it.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from shell_router.batch.journal import Key, Output, Role
from shell_router.batch.pool import Agreement, Pool, Sampling
from shell_router.batch.questions import Question, Questions, plurality
from shell_router.errors import DataError
from shell_router.topology.prompting import AGGREGATOR, fill_text, slot_parts

ROUNDING = 0.005
"""A tau of 0.67 means two of three."""

Outputs = Callable[[Key], Output | None]
"""What was written so far, as `Journal.get` gives it."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What one model is asked: chat messages, and SGLang's sampling parameters."""

    question: str
    role: Role
    model: str
    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any]

    @property
    def key(self) -> Key:
        """What its output will be an output of."""
        return self.question, self.role, self.model

    def failed(self, error: str) -> Output:
        """The output that says why there is none."""
        return Output(self.question, self.role, self.model, error=error)


def verdict_of(
    answers: Sequence[str | None], probabilities: Sequence[float], measure: Agreement = "plurality"
) -> tuple[int | None, float]:
    """The place of an answer that most are for, None where no proposer has one, and how much
    confidence it deserves.

    `probabilities` are those that proposers give to their answers. By plurality C = max_a |{i : a_i
    = a}| / k (MOSAIC, equation 11); a proposer without an answer agrees with none. By probability
    each weighs as much as its own.
    """
    winner = plurality(answers)
    weights = ([1.0] * len(answers)) if (measure == "plurality") else (probabilities)
    if winner is None or not sum(weights):
        return winner, 0.0
    agreeing = sum(
        weight for answer, weight in zip(answers, weights, strict=True) if answer == answers[winner]
    )
    return winner, agreeing / sum(weights)


@dataclass(frozen=True, slots=True)
class Judged:
    """A question after its proposers: their outputs, in order, the place of the winner among them,
    and its confidence.

    `passes`: the winner stands, and no aggregator is needed.
    """

    outputs: Sequence[Output]
    winner: int | None
    confidence: float
    passes: bool

    @property
    def drafts(self) -> list[Output]:
        """The outputs that were written."""
        return [output for output in self.outputs if not output.error]


@dataclass(frozen=True, slots=True)
class Batch:
    """Questions for a pool and, by id, the proposers that answer each, in the order that the
    aggregator reads them.
    """

    pool: Pool
    questions: Questions
    proposers: Mapping[str, Sequence[str]]
    seed: int = 0

    def proposer_prompts(self) -> list[Prompt]:
        """One per question and proposer."""
        return [
            self._prompt(question, "proposer", proposer, question.text, self.pool.sampling)
            for question in self.questions.asked
            for proposer in self.proposers[question.id]
        ]

    def aggregator_prompts(self, outputs: Outputs) -> list[Prompt]:
        """One per question that does not pass the gate and has drafts, with the default prompt of
        topologies.
        """
        to = self.pool.aggregate
        assert to is not None
        return [
            self._prompt(
                question, "aggregator", to.model, _with_drafts(question, judged.drafts), to.sampling
            )
            for question in self.questions.asked
            if not (judged := self.judged(question, outputs)).passes and judged.drafts
        ]

    def judged(self, question: Question, outputs: Outputs) -> Judged:
        """What the proposers' outputs come to; without an aggregator every plurality passes."""
        keys: list[Key] = [
            (question.id, "proposer", proposer) for proposer in self.proposers[question.id]
        ]
        written = [output for key in keys if (output := outputs(key))]
        answers = [None if one.error else self.pool.answers.read(one.text) for one in written]
        gate = self.pool.aggregate
        measure = "plurality" if gate is None else gate.confidence
        winner, confidence = verdict_of(answers, [one.confidence for one in written], measure)
        passes = gate is None or (winner is not None and confidence >= gate.tau - ROUNDING)
        return Judged(written, winner, confidence, passes)

    def _prompt(
        self, question: Question, role: Role, model: str, text: str, sampling: Sampling
    ) -> Prompt:
        system = self.pool.models[model].system
        if system:
            messages = [{"role": "system", "content": system}]
        else:
            messages = []
        seed = (
            zlib.crc32(f"{self.seed}/{question.id}/{role}/{model}".encode()) >> 1
        )  # 31 bits, SGLang's limit
        return Prompt(
            question.id,
            role,
            model,
            [*messages, {"role": "user", "content": text}],
            sampling.params(seed),
        )


def _with_drafts(question: Question, drafts: Sequence[Output]) -> str:
    slots = [
        f"{before}{draft.text}{after}"
        for index, draft in enumerate(drafts, 1)
        for before, after in [slot_parts(AGGREGATOR.slot, draft.model, index)]
    ]
    prefix, suffix = (
        fill_text(part, question.text) for part in (AGGREGATOR.prefix, AGGREGATOR.suffix)
    )
    return "".join((prefix, *slots, suffix))


Source = Literal["proposers", "aggregator", "none"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one proposer answered, None where nothing can be read from it; `right` is None where
    that is not known.
    """

    model: str
    answer: str | None
    confidence: float
    tokens: int
    right: bool | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A line's outcome. `by` says whose `text` it is; tokens are those of all the models that were
    asked.

    `confidence` is the gate's, `winner` the index in `proposals` of the plurality's answer. `right`
    is None where the right answer is not known; `error` is what kept models from answering.
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
    return b"".join(orjson.dumps(result) + b"\n" for result in results)


def read_results(folder: Path) -> list[Result]:
    """The results of a run that has ended. Raises DataError."""
    file = folder / "results.jsonl"
    try:
        return [_read(line) for line in file.read_bytes().splitlines()]
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}.", remedy="Name the folder of a run that has ended."
        ) from error
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{file} is not what a run writes: {error}.", remedy="Run it again."
        ) from error


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
        error = [
            f"The aggregator did not answer: {output.error if output else 'it was not asked.'}"
        ]
    if judged.winner is not None:
        return judged.outputs[judged.winner], "proposers", error
    if judged.drafts:
        return (judged.drafts[-1], "proposers", error)
    return (None, "none", error)


def _proposal(batch: Batch, question: Question, output: Output) -> Proposal:
    if output.error:
        right = None
    else:
        right = question.grade(output.text)
    answer = batch.pool.answers.read(output.text)
    return Proposal(
        output.model, answer, output.confidence, output.completion_tokens, right, output.error
    )
