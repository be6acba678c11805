"""`auto` under load on real engines: more accurate than the small model alone, and faster than the
large one alone?

    python benchmarks/auto.py [--questions N] [--clients N] [--slacks S ...] [--all-scored]
    [--shared] [--json]

The three tiny models, each on an embedded pair of this machine, and the predictors in
models/routing answer test questions that neither models nor predictors were trained on. Each client
asks its next question when it has its answer. The settings take turns on blocks of questions, each
time another one first: a machine's speed drifts.

As models of a cluster have GPUs of their own, the pairs of small and medium keep to one core, that
of large to another; with --shared all run on all cores.

    small, medium, large   one model alone
    round robin            one after the other
    least loaded           the shortest expected wait (Algorithm 1's m_fast)
    best score             what the router scores highest, whatever the load
    auto, slack S          Chimera's Algorithm 1 with the latency slack S
    worth S s              our own: score less wait, where S seconds make up for a right answer

Latency is what a client waited, with the choice and its predictions in it; `choice_ms` is that
part, `scored_pct` the share of choices for which scores were asked. With --all-scored every slack
runs again with scores asked for all, though they cannot change the choice. Intervals are of 95 %:
Wilson's for shares, and for the mean latency that of a normal distribution over blocks of
questions.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from report import Row, report

from agent_cache.memory import MemoryAgentPromptCache
from benchmarks.chimera.baselines import enter_baselines
from shell_router.app.models import run_models
from shell_router.batch.questions import choose_grader, is_right
from shell_router.config import Config, EmbedderSettings, ModelSettings, PredictionSettings
from shell_router.core.engine import UNSTREAMED_INTERVAL, ServedModel
from shell_router.core.events import Degraded, Event, ModelChosen
from shell_router.core.predictors import Forecasts, Predictor, Prospect
from shell_router.core.statistics import Z95, estimate_paired_difference, quantile, wilson
from shell_router.moa.choosing import Auto, ModelChooser, ModelFigures
from shell_router.moa.executor import Executor
from shell_router.moa.requests import MoaRequest
from shell_router.prediction.service import run_predictor
from shell_router.routing.model_choice import ModelChoiceSettings
from shell_router.standins.embedded.settings import EmbeddedSection
from shell_router.topology import AUTO, Agent, Topology

ROOT = Path(__file__).parents[1]
MODELS = ("small", "medium", "large")
ROUTING = ROOT / "models/routing"
QUESTIONS = ROOT / "models/data/test.jsonl"
SAMPLING = {"temperature": 0.0, "max_new_tokens": 128, "stream_interval": UNSTREAMED_INTERVAL}
"""As the router asks for a client that does not stream."""
WARM_UP = 64
LIMIT_S = 60.0
CORES = {"small": (0,), "medium": (0,), "large": (1 % (os.cpu_count() or 1),)}


@dataclass(frozen=True, slots=True)
class Question:
    """A test question and its answer."""

    text: str
    answer: str


@dataclass
class Setting:
    """One way to choose, with an executor of its own, and what it has done so far."""

    name: str
    topology: Topology
    executor: Executor
    latencies_s: list[list[float]] = field(default_factory=list)
    right: dict[int, bool] = field(default_factory=dict)
    chosen: Counter[str] = field(default_factory=Counter)
    choice_s: list[float] = field(default_factory=list)
    scored: int = 0
    unpredicted: int = 0
    took_s: float = 0.0

    def hear(self, event: Event) -> None:
        """Count what a run tells."""
        if isinstance(event, ModelChosen):
            self.choice_s.append(event.at_s - event.started_s)
            self.scored += bool(event.scores)
        self.unpredicted += isinstance(event, Degraded)


@dataclass(frozen=True, slots=True)
class AlwaysScored:
    """See `core.prediction.Predictor`: tells scores, whether they are wanted or not."""

    predictor: Predictor

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        """As the predictor does."""
        return await self.predictor.forecast([replace(one, scored=True) for one in prospects])


async def main() -> None:
    """Run all settings and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=1000, help="per setting (default 1000)")
    parser.add_argument(
        "--block",
        type=int,
        default=100,
        help="questions until the next setting's turn (default 100)",
    )
    parser.add_argument("--clients", type=int, default=64, help="questions under way (default 64)")
    parser.add_argument("--slacks", type=float, nargs="+", default=[0.0, 1.0, 4.0], metavar="S")
    parser.add_argument("--worths", type=float, nargs="+", default=[1.0, 2.0, 4.0], metavar="S")
    parser.add_argument(
        "--all-scored", action="store_true", help="the slacks also with scores for every choice"
    )
    parser.add_argument("--shared", action="store_true", help="all engines on all cores")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    questions = read_questions(options.questions)
    async with AsyncExitStack() as stack:
        served, predictor = await started(stack, shared=options.shared)
        settings = await settings_of(
            served,
            predictor,
            options.slacks,
            options.worths,
            options.clients,
            all_scored=options.all_scored,
        )
        for block, first in enumerate(range(0, len(questions), options.block)):
            part = dict(enumerate(questions[first : first + options.block], start=first))
            for setting in rotated(settings, block):
                await ask_all(setting, part, options.clients)
    rows = [row_of(setting, settings) for setting in settings]
    title = (
        f"auto: {len(questions)} questions, {options.clients} clients that wait for their answers"
    )
    report(title, rows, engine="three embedded pairs, cpu", simulated=False, as_json=options.json)


def read_questions(number: int) -> list[Question]:
    """The first test questions."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[:number]
    return [Question(found["question"], found["answer"]) for found in map(json.loads, lines)]


async def started(
    stack: AsyncExitStack, *, shared: bool
) -> tuple[Mapping[str, ServedModel], Predictor]:
    """The models on their pairs, and the predictors, all answering."""
    config = Config(
        models={
            name: ModelSettings(
                path=ROOT / "models" / name,
                engine={"embedded": EmbeddedSection(cores=() if shared else CORES[name])},
            )
            for name in MODELS
        },
        embedder=EmbedderSettings(model="none"),
        prediction=PredictionSettings(
            scores=ROUTING / "router", lengths=ROUTING / "lengths", limit_s=1.0
        ),
    )
    prediction = await stack.enter_async_context(run_predictor(config.prediction))
    running = await stack.enter_async_context(
        run_models(config, lambda line: print(line, file=sys.stderr))
    )
    async with asyncio.timeout(LIMIT_S):
        while not all([await answers() for answers in prediction.checks.values()]):  # noqa: ASYNC110 - can only be asked
            await asyncio.sleep(0.1)
    assert prediction.predictor is not None
    return {name: model.served for name, model in running.items()}, prediction.predictor


def model_on(cores: tuple[int, ...], name: str) -> ModelSettings:
    """A model whose pair keeps to these cores, or may run on any."""
    return ModelSettings(
        path=ROOT / "models" / name, engine={"embedded": EmbeddedSection(cores=cores)}
    )


async def settings_of(
    served: Mapping[str, ServedModel],
    predictor: Predictor,
    slacks: Sequence[float],
    worths: Sequence[float],
    clients: int,
    *,
    all_scored: bool,
) -> list[Setting]:
    """All settings. What a token costs is measured first, each model alone under the same load, and
    then fixed.
    """
    figures = {}
    for name in MODELS:
        chooser = ModelChooser(served, clock=time.monotonic)
        alone = setting_of(name, plain(name), served, chooser)
        await ask_all(alone, dict(enumerate(read_questions(WARM_UP))), clients)
        figures[name] = ModelFigures(32, chooser.estimates.get_token_s(name))

    def choosing(name: str, settings: ModelChoiceSettings, asked: Predictor = predictor) -> Setting:
        auto = Auto(MODELS, settings, figures)
        return setting_of(
            name, plain(AUTO), served, ModelChooser(served, auto, asked, clock=time.monotonic)
        )

    enter_baselines()
    slack = {one: ModelChoiceSettings("chimera", one) for one in slacks}
    always = AlwaysScored(predictor)

    return [
        *(
            setting_of(name, plain(name), served, ModelChooser(served, clock=time.monotonic))
            for name in MODELS
        ),
        choosing("round robin", ModelChoiceSettings("round_robin")),
        choosing("least loaded", ModelChoiceSettings("least_loaded")),
        *(choosing(f"auto, slack {one:g}", choice) for one, choice in slack.items()),
        *(
            choosing(f"slack {one:g}, all scored", choice, always)
            for one, choice in slack.items()
            if all_scored
        ),
        *(
            choosing(f"worth {worth:g} s", ModelChoiceSettings("worth", answer_worth_s=worth))
            for worth in worths
        ),
        choosing("best score", ModelChoiceSettings("best_score")),
    ]


def plain(model: str) -> Topology:
    """One agent that is asked the question as it is."""
    return Topology(model, {model: Agent(model, model)})


def setting_of(
    name: str, topology: Topology, served: Mapping[str, ServedModel], chooser: ModelChooser
) -> Setting:
    """A setting that has done nothing yet."""
    cache = MemoryAgentPromptCache(clock=time.monotonic)
    return Setting(
        name, topology, Executor(served, cache, None, clock=time.monotonic, chooser=chooser)
    )


def rotated(settings: Sequence[Setting], by: int) -> list[Setting]:
    """Another one first each time."""
    first = by % len(settings)
    return [*settings[first:], *settings[:first]]


async def ask_all(setting: Setting, questions: Mapping[int, Question], clients: int) -> None:
    """Ask a block with that concurrency, and wait for all."""
    left, latencies_s = iter(questions.items()), []

    async def client(
        next_one: Callable[[], tuple[int, Question] | None], ask: Callable[..., Awaitable[float]]
    ) -> None:
        while (found := next_one()) is not None:
            latencies_s.append(await ask(*found))

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(
                client(lambda: next(left, None), lambda number, one: asked(setting, number, one))
            )
    setting.took_s += time.monotonic() - began_s
    setting.latencies_s.append(latencies_s)


async def asked(setting: Setting, number: int, question: Question) -> float:
    """Ask one question; how long its answer took, in seconds."""
    message = {"role": "user", "content": question.text}
    request = MoaRequest(f"{setting.name}-{number}", "bench", (message,), SAMPLING)
    began_s = time.monotonic()
    answer = await setting.executor.run(setting.topology, request, setting.hear)
    took_s = time.monotonic() - began_s
    setting.right[number] = is_right(answer.text, question.answer, choose_grader(question.answer))
    setting.chosen.update(usage.model for usage in answer.agents.values())
    return took_s


def row_of(setting: Setting, settings: Sequence[Setting]) -> Row:
    """The setting, the small model's accuracy and the large one's latency."""
    small, large = settings[0], settings[2]
    right = wilson(sum(setting.right.values()) / len(setting.right), len(setting.right))
    gain = estimate_paired_difference(
        [setting.right[one] - small.right[one] for one in setting.right]
    )
    saved = latency_saved(setting, large)
    latencies_s = [one for block in setting.latencies_s for one in block]
    return {
        "setting": setting.name,
        "right_pct": 100 * right.value,
        "right_interval": f"{100 * right.low:.1f} to {100 * right.high:.1f}",
        "over_small_points": (
            f"{100 * gain.value:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
        ),
        "mean_s": statistics.fmean(latencies_s),
        "p95_s": quantile(latencies_s, 0.95),
        "of_large_pct": f"{100 * saved[0]:.0f} ({100 * saved[1]:.0f} to {100 * saved[2]:.0f})",
        "answers_per_s": len(latencies_s) / setting.took_s,
        "small/medium/large": "/".join(
            f"{100 * setting.chosen[name] / len(latencies_s):.0f}" for name in MODELS
        ),
        "choice_ms": 1000 * statistics.fmean(setting.choice_s) if setting.choice_s else None,
        "scored_pct": 100 * setting.scored / len(setting.choice_s) if setting.choice_s else None,
        "unpredicted": setting.unpredicted,
    }


def latency_saved(setting: Setting, large: Setting) -> tuple[float, float, float]:
    """Mean latency as a share of the large model's alone, block by block, with its interval."""
    ratios = list(block_ratios(setting, large))
    middle = statistics.fmean(ratios)
    reach = Z95 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    return middle, middle - reach, middle + reach


def block_ratios(setting: Setting, large: Setting) -> Iterator[float]:
    """Per block of questions, the mean latency over that of the large model on the same ones."""
    for own, others in zip(setting.latencies_s, large.latencies_s, strict=True):
        yield statistics.fmean(own) / statistics.fmean(others)


if __name__ == "__main__":
    asyncio.run(main())
