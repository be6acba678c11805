"""Workers of a batch without models, and a pool file with the tiny models."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shell_router.batch.profile import Load
from shell_router.core.engine import Generation, ServedModel
from shell_router.errors import EngineError, EngineUnreachable
from tests.fakes.moa import WordTokenizer
from tests.fakes.scripted_engine import Script, ScriptedEngine, at_once


def echo(model: str, text: str) -> Script:
    """The model says what it was asked."""
    return Script(f"{model} heard {text}")


def never(*_names: object) -> bool:
    """Let nothing of the kind happen."""
    return False


def started(_worker: int, _model: str) -> Load:
    """Every load starts an engine."""
    return "engine started"


def no_time(_worker: int, _model: str, _text: str) -> float:
    """Answers come at once."""
    return 0.0


async def soon(_worker: int, _model: str) -> None:
    """A load that only lets others run."""
    await asyncio.sleep(0)


@dataclass
class ScriptedWorkers:
    """The `batch.Workers` that answer by script.

    `says` gives the answer for a model and the text of a chat's last message. `unloadable` tells on
    which worker a model does not load. `kills` tells which text ends the engine, which answers
    nothing from then on. `pace` is the engines' pace; `load` is awaited while a model loads. Under
    a virtual clock an answer takes `seconds` by worker, model and text. A worker that is given a
    second model fails the test.
    """

    says: Callable[[str, str], Script] = echo
    unloadable: Callable[[int, str], bool] = never
    kills: Callable[[str, str], bool] = never
    pace: Callable[[str, int], Awaitable[None]] = at_once
    load: Callable[[int, str], Awaitable[None]] = soon
    seconds: Callable[[int, str, str], float] = no_time
    context_length: int = 4096
    kind: Callable[[int, str], Load] = started
    open: dict[int, str] = field(default_factory=dict)
    loads: list[tuple[int, str]] = field(default_factory=list)
    """Worker and model of every session, failed ones included, in the order in which they began."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Model and text of every prompt that reached an engine."""
    most_running: int = 0
    """The most prompts that one engine had at the same time."""

    @asynccontextmanager
    async def session(self, worker: int, model: str) -> AsyncIterator[tuple[ServedModel, Load]]:
        """See `batch.Workers`."""
        assert worker not in self.open, (
            f"worker {worker} holds {self.open[worker]} and is given {model}"
        )
        self.open[worker] = model
        self.loads.append((worker, model))
        try:
            await self.load(worker, model)
            if self.unloadable(worker, model):
                raise EngineUnreachable(f"{model} did not load on worker {worker}")
            tokenizer = WordTokenizer()
            served = ServedModel(
                model,
                _Mortal(self, worker, model, tokenizer).engine,
                tokenizer,
                self.context_length,
            )
            yield served, self.kind(worker, model)
            await asyncio.sleep(0)  # unloading takes its time, too
        finally:
            del self.open[worker]


class _Mortal:
    """The engine of one session."""

    def __init__(
        self, workers: ScriptedWorkers, worker: int, model: str, tokenizer: WordTokenizer
    ) -> None:
        self._workers = workers
        self._worker = worker
        self._seconds: dict[str, float] = {}
        self._model = model
        self._tokenizer = tokenizer
        self._dead = False
        self.engine = ScriptedEngine(tokenizer, self._answer, pace=self._pace)

    def _answer(self, request: Generation) -> Script:
        text = (
            self._tokenizer.decode(request.input_ids)
            .rpartition("<user>")[2]
            .removesuffix("<assistant>")
        )
        self._workers.asked.append((self._model, text))
        self._seconds[request.rid] = self._workers.seconds(self._worker, self._model, text)
        self._workers.most_running = max(self._workers.most_running, len(self.engine.running))
        self._dead = self._dead or self._workers.kills(self._model, text)
        return (
            Script("", error=self._death()) if self._dead else self._workers.says(self._model, text)
        )

    async def _pace(self, rid: str, piece: int) -> None:
        await asyncio.sleep(self._seconds.pop(rid, 0.0))
        await self._workers.pace(rid, piece)
        if self._dead:
            raise self._death()

    def _death(self) -> EngineError:
        return EngineUnreachable(f"the engine of {self._model} is dead")


ROOT = Path(__file__).parents[2]
COSTS = {"load_s": 1.0, "mean_tokens": 30.0, "max_tokens": 96.0, "start_s": 0.0, "step_s": 0.0}


def write_pool(folder: Path, **changed: Any) -> Path:
    """Two experts and an aggregator on two workers, greedy, with made-up costs."""
    models = {name: {"path": str(ROOT / "models" / name)} for name in ("small", "medium", "large")}
    greedy = {"temperature": 0, "max_new_tokens": 96}
    pool = {
        "models": models,
        "proposers": ["small", "medium"],
        "workers": [{"embedded": {}}, {"embedded": {}}],
        "sampling": greedy,
        "aggregate": {"model": "large", "tau": 1, "sampling": greedy},
        "profile": "costs.yaml",
        **changed,
    }
    write_costs(folder, *pool["models"])
    file = folder / "pool.yaml"
    file.write_text(yaml.safe_dump(pool))
    return file


def write_costs(folder: Path, *models: str) -> Path:
    """A made-up profile; each model is slower than the one before."""
    costs = {name: {**COSTS, "token_s": 0.001 * (1 + place)} for place, name in enumerate(models)}
    file = folder / "costs.yaml"
    file.write_text(yaml.safe_dump({"models": costs, "aggregator": costs["large"]}))
    return file


def write_questions(folder: Path, number: int) -> Path:
    """A file of the first test questions."""
    file = folder / "questions.jsonl"
    lines = (ROOT / "models/data/test.jsonl").read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:number]))
    return file
