"""What the models of a batch are asked, and what the gate makes of what the experts said."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shell_router.batch.answering import Prompt
from shell_router.batch.extract import Extractor
from shell_router.batch.gate import Gate, Verdict, Vote
from shell_router.batch.journal import Key, Output, Role
from shell_router.batch.questions import Question
from shell_router.batch.settings import Aggregating, Sampling
from shell_router.topology.prompting import AGGREGATOR, fill_text, slot_parts

Outputs = Callable[[Key], Output | None]
"""What was written so far, as `Journal.get` gives it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A question after its experts: their outputs, in order, and the gate's verdict; whether it `passes`."""

    outputs: Sequence[Output]
    verdict: Verdict
    passes: bool

    @property
    def drafts(self) -> list[Output]:
        """The outputs that were written."""
        return [output for output in self.outputs if not output.error]


@dataclass(frozen=True, slots=True)
class Batch:
    """Questions and, by id, the experts that answer each, in the order in which the aggregator reads them.

    `systems` are the system prompts of the models that have one; `alike` is, per question, what the gate's confidence
    by similarity would be, once its experts have answered.
    """

    questions: Sequence[Question]
    experts: Mapping[str, Sequence[str]]
    sampling: Sampling
    aggregating: Aggregating | None
    extract: Extractor
    systems: Mapping[str, str]
    seed: int = 0
    alike: Mapping[str, float] = field(default_factory=dict)

    def expert_prompts(self) -> list[Prompt]:
        """One per question and expert."""
        return [
            self._prompt(question, "expert", expert, question.text, self.sampling)
            for question in self.questions
            for expert in self.experts[question.id]
        ]

    def aggregator_prompts(self, outputs: Outputs) -> list[Prompt]:
        """One per question that does not pass the gate and has drafts, with the default prompt of topologies."""
        assert self.aggregating is not None
        asked = [(question, self.judged(question, outputs)) for question in self.questions]
        return [
            self._prompt(
                question,
                "aggregator",
                self.aggregating.model,
                _with_drafts(question, judged.drafts),
                self.aggregating.sampling,
            )
            for question, judged in asked
            if not judged.passes and judged.drafts
        ]

    def judged(self, question: Question, outputs: Outputs) -> Judged:
        """What the experts' outputs come to; without an aggregator every plurality passes."""
        keys: list[Key] = [(question.id, "expert", expert) for expert in self.experts[question.id]]
        written = [output for key in keys if (output := outputs(key))]
        votes = [Vote(None if one.error else self.extract(one.text), one.confidence) for one in written]
        gate = Gate() if self.aggregating is None else self.aggregating.gate()
        verdict = gate.judge(votes, self.alike.get(question.id, 0.0))
        return Judged(written, verdict, self.aggregating is None or gate.passes(verdict))

    def _prompt(self, question: Question, role: Role, model: str, text: str, sampling: Sampling) -> Prompt:
        system = self.systems.get(model)
        messages = [{"role": "system", "content": system}] if system else []
        seed = zlib.crc32(f"{self.seed}/{question.id}/{role}/{model}".encode()) >> 1  # 31 bits, SGLang's limit
        return Prompt(question.id, role, model, [*messages, {"role": "user", "content": text}], sampling.params(seed))


def _with_drafts(question: Question, drafts: Sequence[Output]) -> str:
    slots = [
        f"{before}{draft.text}{after}"
        for index, draft in enumerate(drafts, 1)
        for before, after in [slot_parts(AGGREGATOR.slot, draft.model, index)]
    ]
    ends = [fill_text(part, question.text) for part in (AGGREGATOR.prefix, AGGREGATOR.suffix)]
    return "".join((ends[0], *slots, ends[1]))
