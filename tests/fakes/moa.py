"""A whole online path without models.

It has scripted engines, word tokenizers, the memory cache and a hash embedder.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ClassVar, TypeVar

from agent_cache import AgentPromptCache
from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.control_text import BREAK, ControlText
from shell_router.core.engine import NO_OPTIONS, CallParser, Generation, ServedModel
from shell_router.core.events import Event
from shell_router.core.marks import ReasoningMarks
from shell_router.core.predictors import Forecast, Forecasts, Prediction, Predictor, Prospect
from shell_router.engines.embedding import HashEmbedder
from shell_router.moa.choosing import ModelChooser
from shell_router.moa.executor import Executor
from shell_router.moa.programs import Programs
from shell_router.moa.registry import ProgramLimits
from shell_router.moa.requests import MoaRequest
from shell_router.routing.holdout import Holdouts
from tests.fakes.scripted_engine import Script, ScriptedEngine, at_once


class WordTokenizer:
    """Each run of letters, with the space before it, is one token, as is every other character.

    All tokenizers of one `family` share ids; another family numbers the same words otherwise.
    """

    _families: ClassVar[defaultdict[str, dict[str, int]]] = defaultdict(dict)

    def __init__(self, family: str = "words") -> None:
        self.fingerprint = family
        self.control = ControlText()
        self._offset = sum(family.encode()) * 1000
        self._ids = self._families[family]

    def encode(self, text: str) -> list[int]:
        """Ids of the words of `text`."""
        return [self._id(word) for word in _words(text)]

    def encode_stable(self, text: str) -> list[int]:
        """All but the last word's id: it may grow."""
        return [self._id(word) for word in _words(text)[:-1]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that was encoded."""
        words = {number: word for word, number in self._ids.items()}
        return "".join(words[number] for number in ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        """`<role>content` for each message, the options before and the tools' names, then
        `<assistant>`.
        """
        nulls = [
            " ".join(["", *(name for name, given in tool.items() if given is None)])
            for tool in tools
        ]
        offered = "".join(
            f"<tool {tool['function']['name']}{more}>"
            for tool, more in zip(tools, nulls, strict=True)
        )
        given = "".join(f"<{name}={value}>" for name, value in options.items())
        said = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return f"{given}{offered}{said}<assistant>"

    def _id(self, word: str) -> int:
        return self._ids.setdefault(word, self._offset + len(self._ids))


class ControlWordTokenizer(WordTokenizer):
    """Has the control token `<end>`, and reads texts around a BREAK apart."""

    def __init__(self, family: str = "words") -> None:
        super().__init__(f"{family} and control")
        self.control = ControlText(["<end>"])
        self.control.plain_ids = {self._id("<end>"): self.encode(self.control.quote("<end>"))}

    def encode(self, text: str) -> list[int]:
        words = []
        for piece in text.split(BREAK):
            words += re.findall(r"<end>| ?[^\W\d_]+|.", piece, flags=re.DOTALL)
        return [self._id(word) for word in words]

    def encode_stable(self, text: str) -> list[int]:
        """Nothing: the text's end may be the beginning of a control token."""
        return []

    def count_control(self, ids: Sequence[int]) -> int:
        """How many control tokens are in a prompt."""
        return ids.count(self._id("<end>"))


def _words(text: str) -> list[str]:
    return re.findall(r" ?[^\W\d_]+|.", text, flags=re.DOTALL)


Kind = TypeVar("Kind")


class Recorder:
    """Pass `recorder.emit` where events are wanted."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._more = asyncio.Event()

    def emit(self, event: Event) -> None:
        """Keep the event and wake the waiting test."""
        self.events.append(event)
        self._more.set()

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, wanted: Callable[["Recorder"], bool], limit_s: float = 10.0) -> None:
        """Return once `wanted` holds; TimeoutError if it never does."""
        async with asyncio.timeout(limit_s):
            while not wanted(self):
                self._more.clear()
                await self._more.wait()


@dataclass
class FixedPredictor:
    """Tells the same of every prospect, and keeps what it was asked."""

    scores: Mapping[str, float] = field(default_factory=dict)
    own_tokens: Mapping[str, float] = field(default_factory=dict)
    total_tokens: Mapping[str, float] = field(default_factory=dict)
    trouble: Mapping[Prediction, str] = field(default_factory=dict)
    asked: list[Prospect] = field(default_factory=list)

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        self.asked += prospects
        reported = [
            Forecast(self.scores if one.scored else {}, self.own_tokens, self.total_tokens)
            for one in prospects
        ]
        return Forecasts(reported, self.trouble)


def agent_of(request: Generation) -> str:
    """The agent that an executor's request id names."""
    return request.rid.rpartition(".")[2]


def by_agent(scripts: Mapping[str, Script | str]) -> Callable[[Generation], Script]:
    """Answers looked up by agent; one that is not listed says its own name a few times."""

    def answer(request: Generation) -> Script:
        agent = agent_of(request)
        script = scripts.get(agent, f"{agent} thinks and {agent} speaks and then {agent} is done")
        return Script(script) if isinstance(script, str) else script

    return answer


class ScriptedMoa:
    """The models `small`, `medium` and `large`, each on a scripted engine.

    `other` has a tokenizer of its own.
    """

    def __init__(
        self,
        scripts: Mapping[str, Script | str] | None = None,
        *,
        pace: Callable[[str, int], Awaitable[None]] = at_once,
        context_length: int = 4096,
        kept_requests: int = 10_000,
        cached_tokens: int = 1_000_000,
        predictor: Predictor | None = None,
        reasoning: ReasoningMarks | None = None,
        call_mark: str | None = None,
        call_parser: CallParser | None = None,
        tokenizer: type[WordTokenizer] = WordTokenizer,
    ) -> None:
        self.tokenizers = {"other": tokenizer("other")} | dict.fromkeys(
            ("small", "medium", "large"), tokenizer()
        )
        self.engines = {
            alias: ScriptedEngine(
                tokenizer,
                by_agent(scripts or {}),
                pace=pace,
                kept_requests=kept_requests,
                cached_tokens=cached_tokens,
            )
            for alias, tokenizer in self.tokenizers.items()
        }
        self.models = {
            alias: ServedModel(
                alias,
                engine,
                self.tokenizers[alias],
                context_length,
                reasoning=reasoning,
                call_mark=call_mark,
                call_parser=call_parser,
            )
            for alias, engine in self.engines.items()
        }
        self.cache = MemoryAgentPromptCache(clock=monotonic)
        self.embedder = HashEmbedder()
        chooser = ModelChooser(self.models, predictor=predictor, clock=monotonic)
        self.executor = Executor(
            self.models, self.cache, self.embedder, clock=monotonic, chooser=chooser
        )
        self.programs = Programs(self.executor)

    @property
    def running(self) -> set[str]:
        """Requests that any engine still runs."""
        return set().union(*(engine.running for engine in self.engines.values()))

    @property
    def aborted(self) -> set[str]:
        """Agents whose request was abandoned on an engine."""
        return {
            rid.rpartition(".")[2] for engine in self.engines.values() for rid in engine.aborted
        }

    def prompts(self, alias: str) -> list[str]:
        """All complete prompts that the model was asked with."""
        return [
            self.tokenizers[alias].decode(request.input_ids)
            for request in self.engines[alias].generated
        ]

    def prompt_of(self, agent: str) -> str:
        """The complete prompt that `agent` was asked with."""
        for alias, engine in self.engines.items():
            for request in engine.generated:
                if agent_of(request) == agent:
                    return self.tokenizers[alias].decode(request.input_ids)
        raise LookupError(agent)


def open_programs(
    models: Mapping[str, ServedModel],
    cache: AgentPromptCache,
    *,
    clock: Callable[[], float],
    limits: ProgramLimits | None = None,
    chooser: ModelChooser | None = None,
    holdouts: Holdouts | None = None,
) -> Programs:
    """The programs of a router of its own."""
    executor = Executor(models, cache, HashEmbedder(), clock=clock, chooser=chooser)
    executor.holdouts = holdouts or executor.holdouts
    return Programs(executor, limits)


def ask(question: str = "What is it?", *, run_id: str = "run", **fields: object) -> MoaRequest:
    """A request of one user message."""
    return MoaRequest(run_id, "tenant", ({"role": "user", "content": question},), **fields)  # type: ignore[arg-type]
