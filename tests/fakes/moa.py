"""A whole online path without models: scripted engines, word tokenizers, the memory cache and a hash embedder."""

from collections.abc import Awaitable, Callable, Mapping
from time import monotonic

from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.generation import Generation
from shell_router.core.model import ServedModel
from shell_router.core.prediction import Predictor
from shell_router.engines.embedder import HashEmbedder
from shell_router.engines.scripted import Script, ScriptedEngine, at_once
from shell_router.execution import (
    Classes,
    Executor,
    Judges,
    MoaRequest,
    ModelChooser,
    Programs,
    Scores,
    StepExecutor,
)
from tests.fakes.words import WordTokenizer


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
    """Models `small`, `medium`, `large` on one scripted engine each; `other` has a tokenizer of its own."""

    def __init__(
        self,
        scripts: Mapping[str, Script | str] | None = None,
        *,
        pace: Callable[[str, int], Awaitable[None]] = at_once,
        context_length: int = 4096,
        kept_requests: int = 10_000,
        cached_tokens: int = 1_000_000,
        predictor: Predictor | None = None,
    ) -> None:
        self.tokenizers = {"other": WordTokenizer("other")} | dict.fromkeys(
            ("small", "medium", "large"), WordTokenizer()
        )
        self.engines = {
            alias: ScriptedEngine(
                tokenizer, by_agent(scripts or {}), pace=pace, kept_requests=kept_requests, cached_tokens=cached_tokens
            )
            for alias, tokenizer in self.tokenizers.items()
        }
        self.models = {
            alias: ServedModel(alias, engine, self.tokenizers[alias], context_length)
            for alias, engine in self.engines.items()
        }
        self.cache = MemoryAgentPromptCache(clock=monotonic)
        self.embedder = HashEmbedder()
        chooser = ModelChooser(self.models, predictor=predictor, clock=monotonic)
        agents = Executor(self.models, self.cache, self.embedder, clock=monotonic, chooser=chooser)
        judges = Judges(Classes(self.embedder), Scores(chooser, self.models))
        self.executor = StepExecutor(agents, judges, clock=monotonic)
        self.programs = Programs(self.models, self.cache, clock=monotonic)

    @property
    def running(self) -> set[str]:
        """Requests that any engine still runs."""
        return set().union(*(engine.running for engine in self.engines.values()))

    @property
    def aborted(self) -> set[str]:
        """Agents whose request was abandoned on an engine."""
        return {rid.rpartition(".")[2] for engine in self.engines.values() for rid in engine.aborted}

    def prompt_of(self, agent: str) -> str:
        """The complete prompt that `agent` was asked with."""
        for alias, engine in self.engines.items():
            for request in engine.generated:
                if agent_of(request) == agent:
                    return self.tokenizers[alias].decode(request.input_ids)
        raise LookupError(agent)


def ask(question: str = "What is it?", *, run_id: str = "run", **fields: object) -> MoaRequest:
    """A request of one user message."""
    return MoaRequest(run_id, "tenant", ({"role": "user", "content": question},), **fields)  # type: ignore[arg-type]
