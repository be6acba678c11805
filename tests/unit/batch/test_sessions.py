import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.batch.journal import Output
from shell_router.batch.planner import (
    BatchPlan,
    ModelWork,
    Session,
    Workload,
    plan_wrap_around,
    schedule_sessions,
)
from shell_router.batch.pool import Sampling
from shell_router.batch.profile import Load
from shell_router.batch.prompts import BatchPrompt
from shell_router.batch.queues import WorkerQueues
from shell_router.batch.sessions import Follow, Move, Planner, Replanning, Sessions, answer_prompt
from shell_router.core.engine import ServedModel
from shell_router.errors import (
    ConfigError,
    EngineRejected,
    EngineUnreachable,
    PromptTooLong,
    ShellRouterError,
)
from shell_router.lab.simulation.virtual_time import run_virtual
from tests.fakes.moa import WordTokenizer
from tests.fakes.pools import ScriptedWorkers, echo
from tests.fakes.scripted_engine import Hold, Script, ScriptedEngine
from tests.fakes.timers import SteppedTimers
from tests.fakes.turns import Turns, counted

Shares = Sequence[Mapping[str, int]]
NEVER = 1e9
"""A share by which no session is off its plan."""


def prompt(model: str, number: int) -> BatchPrompt:
    messages = [{"role": "user", "content": f"{model}{number}"}]
    return BatchPrompt(f"q{number}", "proposer", model, messages, Sampling().params(0))


def cost(model: str, prompts: int) -> ModelWork:
    return ModelWork(model, prompts, load_s=10.0, per_prompt_s=1.0)


@dataclass
class Run(Follow):
    """A plan that gives every worker its share, and what came of it."""

    workers: ScriptedWorkers
    shares: Shares
    concurrency: int = 4
    refuse: Callable[[Output], None] | None = None
    planner: Planner | None = None
    may_move: bool = True
    outputs: list[Output] = field(default_factory=list)
    sessions: Sequence[Session] = ()
    messages: list[str] = field(default_factory=list)
    kinds: list[Load] = field(default_factory=list)
    left_s: list[float] = field(default_factory=list)
    timers: SteppedTimers = field(default_factory=SteppedTimers)

    def __post_init__(self) -> None:
        self.clock = self.timers.clock
        asked = sum((Counter(dict(share)) for share in self.shares), Counter[str]())
        models = [cost(model, prompts) for model, prompts in asked.items()]
        self.prompts = {
            model.name: [prompt(model.name, n) for n in range(model.prompts)] for model in models
        }
        work = Workload(tuple(models), len(self.shares), max(1, len(models)))
        plan = BatchPlan("by hand", schedule_sessions(work, self.shares), 0.0)
        self.running = Sessions(
            WorkerQueues(models, self.prompts, plan, len(self.shares)),
            self.workers,
            self._output,
            self,
            concurrency=self.concurrency,
            clock=lambda: self.clock(),  # noqa: PLW0108 - it may change
            replanning=Replanning(
                self.planner or plan_wrap_around, len(models), 0.25 if self.planner else NEVER
            )
            if self.may_move
            else None,
        )

    @property
    def moved(self) -> Counter[Move]:
        return self.running.moved

    def on_load(self, load: Load, seconds: float) -> None:
        self.kinds.append(load)

    def on_progress(self, line: str) -> None:
        self.messages.append(line)

    async def _output(self, output: Output) -> None:
        await asyncio.sleep(0)  # as it is written in a thread
        if self.refuse:
            self.refuse(output)
        self.outputs.append(output)
        self.left_s.append(self.running.queues.left_s)

    async def done(self) -> "Run":
        async with asyncio.timeout(20):
            self.sessions = await self.running.run()
        return self

    @property
    def errors(self) -> dict[str, str]:
        """The errors, by model and question."""
        return {f"{one.model} {one.question}": one.error for one in self.outputs if one.error}

    @property
    def wanted(self) -> Counter[tuple[str, str, str]]:
        return Counter(one.key for prompts in self.prompts.values() for one in prompts)

    def require_each_once(self) -> None:
        """Every prompt has one output, and nothing is left open."""
        assert Counter(output.key for output in self.outputs) == self.wanted
        assert not self.workers.open
        assert self.running.queues.left_s == 0


@st.composite
def troubles(draw: st.DrawFn) -> tuple[Shares, set[tuple[int, str]], set[str], set[str], int]:
    """Shares of at most three workers, where which model does not load, which prompts kill, which
    fail for a while.
    """
    models = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
    share = st.dictionaries(st.sampled_from(models), st.integers(1, 6), max_size=len(models))
    shares = draw(st.lists(share, min_size=1, max_size=3))
    places = st.tuples(st.integers(0, len(shares) - 1), st.sampled_from(models))
    killers = {f"{model}{draw(st.integers(0, 6))}" for model in models if draw(st.booleans())}
    texts = st.builds("{}{}".format, st.sampled_from(models), st.integers(0, 9))
    passing = {
        text
        for text in draw(st.sets(texts, max_size=4))
        if text[0] not in {killer[0] for killer in killers}
    }
    return shares, draw(st.sets(places, max_size=4)), killers, passing, draw(st.integers(1, 4))


@given(troubles())
def test_whatever_fails_every_prompt_has_one_output_and_only_what_cannot_be_answered_an_error(
    trouble: tuple[Shares, set[tuple[int, str]], set[str], set[str], int],
) -> None:
    shares, unloadable, killers, passing, concurrency = trouble
    tried: Counter[str] = Counter()

    def says(model: str, text: str) -> Script:
        tried[text] += 1
        failing = text in passing and tried[text] == 1
        return (
            Script("no", error=EngineUnreachable("for a moment")) if failing else echo(model, text)
        )

    workers = ScriptedWorkers(
        says, lambda *place: place in unloadable, lambda _, text: text in killers
    )
    run = Run(workers, shares, concurrency)
    asyncio.run(run.done())
    run.require_each_once()
    everywhere = {
        model for model in run.prompts if all((n, model) in unloadable for n in range(len(shares)))
    }
    failed = {output.model + output.question[1:] for output in run.outputs if output.error}
    asked = {output.model + output.question[1:] for output in run.outputs}
    lost = {text for text in asked if text[0] in everywhere} | (killers & asked)
    assert lost <= failed <= lost | passing
    assert workers.most_running <= concurrency


async def test_each_worker_loads_what_the_plan_says_in_its_order() -> None:
    run = await Run(ScriptedWorkers(), [{"a": 3, "b": 1}, {"b": 2, "c": 1}]).done()
    run.require_each_once()
    assert [model for worker, model in run.workers.loads if worker == 0] == ["a", "b"]
    assert [model for worker, model in run.workers.loads if worker == 1] == ["b", "c"]
    assert {output.text for output in run.outputs if output.model == "b"} == {
        f"b heard b{n}" for n in range(3)
    }
    assert sorted((one.worker, one.model, one.prompts) for one in run.sessions) == [
        (0, "a", 3),
        (0, "b", 1),
        (1, "b", 2),
        (1, "c", 1),
    ]


async def test_each_load_is_reported_with_its_kind_and_its_seconds() -> None:
    async def load(_worker: int, _model: str) -> None:
        run.timers.step(7.0)

    workers = ScriptedWorkers(
        kind=lambda _, model: "weights swapped" if model == "b" else "engine started", load=load
    )
    run = Run(workers, [{"a": 9, "b": 2}])
    await run.done()
    assert run.kinds == ["engine started", "weights swapped"]
    assert run.messages == [
        "worker 0: a answers 9 prompts (engine started in 7.0 s)",
        "worker 0: b answers 2 prompts (weights swapped in 7.0 s)",
    ]


LOAD_S = 10.0


async def _load(_worker: int, _model: str) -> None:
    await asyncio.sleep(LOAD_S)


def timed(
    shares: Shares,
    seconds: Callable[[int, str, str], float],
    concurrency: int = 1,
    planner: Planner | None = None,
    **failing: Callable[[int, str], object] | Callable[[str, str], bool],
) -> Run:
    """A run in virtual time, in which a load takes `LOAD_S` and each answer what `seconds` says;
    planned 1 s.
    """

    async def ran() -> Run:
        workers = ScriptedWorkers(seconds=seconds, **{"load": _load, **failing})  # type: ignore[arg-type]
        run = Run(workers, shares, concurrency, planner=planner)
        run.clock = asyncio.get_running_loop().time
        run.sessions = await run.running.run()
        return run

    run = run_virtual(ran())
    run.require_each_once()
    return run


def test_a_worker_that_is_done_takes_half_of_what_is_left_of_a_session_of_its_model_without_a_load() -> (
    None
):
    slow = timed([{"a": 20}, {"a": 20}], lambda worker, *_: 3.0 if worker else 1.0)
    assert slow.workers.loads == [(0, "a"), (1, "a")]
    # at 20 s after the loads 14 prompts are left, one of them with the engine: 7 are taken, then 4
    # of 8, 1 of 3, 1 of 2
    assert slow.messages[2:] == [
        "worker 0: takes 7 prompts of a from worker 1",
        "worker 0: takes 2 prompts of a from worker 1",
        "worker 0: takes 1 prompts of a from worker 1",
    ]
    assert sorted((one.worker, one.prompts) for one in slow.sessions) == [(0, 30), (1, 10)]
    assert max(one.end_s for one in slow.sessions) == LOAD_S + 30
    assert slow.moved == {"taken": 10}


async def test_a_run_that_keeps_to_its_plan_moves_nothing() -> None:
    run = await Run(ScriptedWorkers(), [{"a": 3, "b": 1}, {"b": 2}], may_move=False).done()
    assert run.workers.loads == [(0, "a"), (1, "b"), (0, "b")]
    assert not run.moved


def test_what_a_worker_takes_of_a_queued_share_spares_the_other_the_load() -> None:
    run = timed([{"a": 5}, {"b": 30, "a": 4}], lambda *_: 1.0)
    assert run.workers.loads == [(0, "a"), (1, "b")]
    assert run.messages[-1] == "worker 0: takes 4 prompts of a from worker 1"
    assert max(one.end_s for one in run.sessions) == LOAD_S + 30


def test_a_worker_with_other_models_queued_takes_nothing_and_none_is_taken_from_what_an_engine_has() -> (
    None
):
    queued = timed([{"a": 20, "b": 2}, {"a": 40}], lambda *_: 1.0)
    assert not any("takes" in message for message in queued.messages)
    begun = timed([{"a": 1}, {"a": 4}], lambda worker, *_: 1.0 + worker, concurrency=4)
    assert not any("takes" in message for message in begun.messages)


def by_model(**seconds: float) -> Callable[[int, str, str], float]:
    return lambda _worker, model, _text: seconds.get(model, 1.0)


def makespan_s(run: Run) -> float:
    return max(one.end_s for one in run.sessions)


def test_what_waits_for_a_session_that_is_late_is_planned_again_with_the_measured_costs() -> None:
    shares = [{"a": 30}, {"b": 30}]
    late = timed(shares, by_model(b=5.0), planner=plan_wrap_around)
    assert makespan_s(timed(shares, by_model(b=5.0))) == LOAD_S + 30 * 5
    # when a is done, b has answered 6 and begun the 7th: of 23 others at about 5 s, worker 0 loads
    # b for 11
    assert late.workers.loads == [(0, "a"), (1, "b"), (0, "b")]
    assert late.moved["replanned"] == 11
    assert makespan_s(late) <= 40 + LOAD_S + 12 * 5
    assert (
        "sessions took longer or shorter than planned: 11 prompts go to other workers"
        in late.messages[2]
    )


def test_the_rest_goes_to_a_worker_that_holds_its_model_and_is_sooner_done_than_planned() -> None:
    shares = [{"a": 40, "c": 5}, {"b": 25, "a": 20}]
    run = timed(shares, by_model(a=0.1), planner=plan_wrap_around)
    assert run.workers.loads == [(0, "a"), (1, "b"), (0, "c")]
    assert makespan_s(run) < makespan_s(timed(shares, by_model(a=0.1)))


def test_a_running_session_that_is_sooner_done_than_planned_is_seen_when_another_ends() -> None:
    run = timed([{"a": 80}, {"b": 100}, {"c": 20}], by_model(b=0.3), planner=plan_wrap_around)
    begins_s = {(one.worker, one.model): one.begin_s for one in run.sessions}
    assert begins_s[2, "a"] == LOAD_S + 20, "b ends 10 s later"


def test_sessions_that_take_as_long_as_planned_or_nearly_so_are_not_planned_again() -> None:
    def planner(workload: Workload) -> BatchPlan:
        raise AssertionError(workload)

    for pace in (0.8, 1.0, 1.2):
        run = timed(
            [{"a": 30, "b": 10}, {"c": 20, "b": 20}],
            by_model(a=pace, b=pace, c=pace),
            planner=planner,
        )
        assert set(run.moved) <= {"taken"}


def test_a_new_plan_that_ends_no_sooner_than_what_an_engine_has_begun_is_not_followed() -> None:
    shares = [{"a": 32}, {"b": 24, "c": 20}, {"d": 4}]
    run = timed(shares, by_model(a=320.0, b=100.0, d=4.0), concurrency=32, planner=plan_wrap_around)
    assert not run.moved
    assert run.workers.loads == [(0, "a"), (1, "b"), (2, "d"), (1, "c")]


def test_a_load_is_compared_once_however_many_shares_follow_it() -> None:
    def planner(workload: Workload) -> BatchPlan:
        raise AssertionError(workload)

    async def load(_worker: int, _model: str) -> None:
        await asyncio.sleep(1.8 * LOAD_S)

    shares = [{"a": 40}, {"a": 70}, {"b": 90}]
    run = timed(shares, lambda worker, *_: 1.1 if worker == 1 else 1.0, planner=planner, load=load)
    assert run.moved["taken"] > 10


async def _never(_workload: Workload) -> BatchPlan:
    await asyncio.sleep(1e6)
    raise AssertionError


async def _fails(_workload: Workload) -> BatchPlan:
    raise EngineUnreachable("the planner is gone")


@pytest.mark.parametrize(
    ("planner", "reason"), [(_never, "planning took too long"), (_fails, "the planner is gone")]
)
def test_a_run_goes_on_by_its_plan_where_planning_again_fails_or_takes_too_long(
    planner: Planner, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = timed([{"a": 30}, {"b": 30}], by_model(b=5.0), planner=planner)
    assert not run.moved
    assert makespan_s(run) == LOAD_S + 30 * 5
    assert f"The rest is not planned again: {reason}" in caplog.text


def test_what_was_begun_while_it_was_planned_stays_where_it_is() -> None:
    async def planner(workload: Workload) -> BatchPlan:
        await asyncio.sleep(8.0)  # the session that is late begins one or two more
        return plan_wrap_around(workload)

    run = timed([{"a": 30}, {"b": 30}], by_model(b=5.0), planner=planner)
    assert run.workers.loads == [(0, "a"), (1, "b"), (0, "b")]
    assert makespan_s(run) <= 40 + 8 + LOAD_S + 12 * 5


@given(troubles(), st.integers(0, 99))
def test_whatever_takes_long_or_fails_while_prompts_move_each_has_one_output(
    trouble: tuple[Shares, set[tuple[int, str]], set[str], set[str], int], seed: int
) -> None:
    shares, unloadable, killers, _, concurrency = trouble

    def seconds(worker: int, model: str, text: str) -> float:
        return 10 ** random.Random(f"{seed}{worker % 2}{model}{text if seed % 2 else ''}").uniform(
            -2, 2
        )

    run = timed(
        shares,
        seconds,
        concurrency,
        plan_wrap_around,
        unloadable=lambda *place: place in unloadable,
        kills=lambda _, text: text in killers,
    )
    everywhere = {
        model for model in run.prompts if all((n, model) in unloadable for n in range(len(shares)))
    }
    failed = {output.model + output.question[1:] for output in run.outputs if output.error}
    assert failed == {text for text in failed if text in killers or text[0] in everywhere}


async def test_a_worker_that_cannot_load_hands_its_share_to_all_others() -> None:
    run = Run(ScriptedWorkers(unloadable=lambda worker, _: worker == 0), [{"a": 60}, {}, {}])
    await run.done()
    run.require_each_once()
    assert not run.errors
    assert sorted((one.worker, one.prompts) for one in run.sessions) == [(1, 30), (2, 30)]


async def test_what_is_handed_on_is_loaded_together_with_what_waits_for_the_same_model() -> None:
    hold = Hold()
    workers = ScriptedWorkers(unloadable=lambda worker, _: worker == 0, pace=hold.pace)
    run = Run(workers, [{"a": 2}, {"b": 9, "a": 2}])
    running = asyncio.create_task(run.done())
    await hold.until_waiting()  # worker 1 answers b; worker 0 has failed by then
    hold.release()
    await running
    run.require_each_once()
    assert workers.loads == [(0, "a"), (1, "b"), (1, "a")]


async def test_of_an_engine_that_dies_only_what_it_had_not_answered_is_asked_again() -> None:
    killed: list[str] = []

    def kills(_model: str, text: str) -> bool:
        killed.extend([text] if text == "a5" and not killed else [])
        return text == "a5" and len(killed) == 1 and workers.asked.count(("a", "a5")) == 1

    workers = ScriptedWorkers(kills=kills)
    run = await Run(workers, [{"a": 8}, {}], concurrency=1).done()
    run.require_each_once()
    assert not run.errors
    assert workers.loads == [(0, "a"), (1, "a")]
    assert [(one.worker, one.prompts) for one in run.sessions] == [(0, 5), (1, 3)]
    answered_by_the_first = {f"a{n}" for n in range(5)}
    assert all(
        times == 1
        for (_, text), times in Counter(workers.asked).items()
        if text in answered_by_the_first
    )


async def test_a_model_is_given_up_after_three_workers_however_many_there_are() -> None:
    run = await Run(
        ScriptedWorkers(unloadable=lambda _, model: model == "a"), [{"a": 1}, *[{}] * 7]
    ).done()
    run.require_each_once()
    assert len(run.workers.loads) == 3
    assert len({worker for worker, _ in run.workers.loads}) == 3


@pytest.mark.parametrize("places", [1, 2, 8])
async def test_a_model_that_loads_and_answers_nothing_is_given_up_after_few_loads(
    places: int,
) -> None:
    workers = ScriptedWorkers(lambda *_: Script("no", error=EngineUnreachable("it is broken")))
    run = await Run(workers, [{"a": 40}, *[{}] * (places - 1)]).done()
    run.require_each_once()
    assert set(run.errors.values()) == {"it is broken"}
    assert len(run.errors) == 40
    assert len(workers.loads) == 3


async def test_a_model_that_answers_nothing_is_given_up_soon_however_many_workers_load_it() -> None:
    workers = ScriptedWorkers(lambda *_: Script("no", error=EngineUnreachable("it is broken")))
    run = await Run(workers, [{"a": 5}] * 8).done()
    run.require_each_once()
    assert len(run.errors) == 40
    assert len(workers.loads) <= 8 + 2


async def test_a_model_that_has_answered_elsewhere_is_not_given_up_for_several_bad_prompts() -> (
    None
):
    async def load(worker: int, _model: str) -> None:
        while worker and len(run.outputs) < 5:  # noqa: ASYNC110 - the first worker is done before the others begin
            await asyncio.sleep(0)

    workers = ScriptedWorkers(kills=lambda _, text: text in ("a5", "a10", "a15"), load=load)
    run = Run(workers, [{"a": 5}] * 4)
    await run.done()
    run.require_each_once()
    assert run.errors.keys() == {"a q5", "a q10", "a q15"}


@pytest.mark.parametrize(
    ("places", "poison", "concurrency"), [(1, "a0", 1), (2, "a7", 4), (4, "a19", 32), (1, "a3", 32)]
)
async def test_a_prompt_that_every_engine_dies_of_costs_only_itself(
    places: int, poison: str, concurrency: int
) -> None:
    workers = ScriptedWorkers(kills=lambda _, text: text == poison)
    run = await Run(workers, [{"a": 20, "b": 2}, *[{"b": 2}] * (places - 1)], concurrency).done()
    run.require_each_once()
    assert run.errors == {f"a q{poison[1:]}": "the engine of a is dead"}


async def test_a_worker_whose_engine_died_takes_the_rest_itself_where_no_other_loads_the_model() -> (
    None
):
    workers = ScriptedWorkers(
        unloadable=lambda worker, _: worker == 1,
        kills=lambda _, text: text == "a4" and workers.asked.count(("a", "a4")) == 1,
    )
    run = await Run(workers, [{"a": 9}, {}], concurrency=1).done()
    run.require_each_once()
    assert not run.errors
    assert workers.loads == [(0, "a"), (1, "a"), (0, "a")]


async def test_an_engine_that_dies_late_is_no_reason_to_give_up_a_model_that_fails_elsewhere() -> (
    None
):
    workers = ScriptedWorkers(
        unloadable=lambda worker, model: model == "a" and worker > 0,
        kills=lambda _, text: text == "a30" and workers.asked.count(("a", "a30")) == 1,
    )
    run = await Run(workers, [{"a": 40}, {"b": 1, "a": 1}, {"b": 1}, {}], concurrency=1).done()
    run.require_each_once()
    assert len(run.errors) <= 1  # what worker 1 was given, and two others could not load


@pytest.mark.parametrize(
    "refusal",
    [
        EngineRejected("not this", status=400),
        PromptTooLong("too long for me"),
        ConfigError("no chat template"),
    ],
)
async def test_a_prompt_that_is_refused_is_an_error_at_once(refusal: ShellRouterError) -> None:
    def says(model: str, text: str) -> Script:
        if text == "a1":
            raise refusal
        return echo(model, text)

    run = await Run(ScriptedWorkers(says), [{"a": 3}]).done()
    run.require_each_once()
    assert run.errors == {"a q1": str(refusal)}
    assert run.workers.asked.count(("a", "a1")) == 1


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_an_engine_that_has_no_time_is_asked_again(status: int) -> None:
    def says(model: str, text: str) -> Script:
        first = workers.asked.count((model, text)) == 1
        return (
            Script("", error=EngineRejected("later", status=status))
            if text == "a1" and first
            else echo(model, text)
        )

    workers = ScriptedWorkers(says)
    run = await Run(workers, [{"a": 3}]).done()
    run.require_each_once()
    assert {output.text for output in run.outputs} == {f"a heard a{n}" for n in range(3)}
    assert workers.loads == [(0, "a")], "in the same session"


async def test_a_prompt_that_does_not_fit_the_context_is_an_error_that_says_so_and_is_not_asked() -> (
    None
):
    assert not (await Run(ScriptedWorkers(context_length=520), [{"a": 2}]).done()).errors
    run = await Run(ScriptedWorkers(context_length=519), [{"a": 2}]).done()
    run.require_each_once()
    assert len(run.errors) == 2
    assert "A prompt of 8 tokens and 512 new ones are more than the 519" in run.errors["a q0"]
    assert not run.workers.asked


async def test_the_estimate_falls_to_nothing() -> None:
    run = Run(ScriptedWorkers(), [{"a": 5, "b": 2}, {"b": 4}], concurrency=1)
    assert run.running.queues.left_s == (10 + 5) + (10 + 2)  # before it begins
    await run.done()
    assert run.left_s[0] == pytest.approx(4 + 10 + 2)
    assert run.left_s == sorted(run.left_s, reverse=True)
    assert run.running.queues.left_s == 0


async def test_sessions_are_timed_from_the_start_of_the_run_loads_included() -> None:
    run = Run(ScriptedWorkers(load=lambda *_: _stepped(run, 7.0)), [{"a": 2, "b": 1}])
    run.timers.step(100.0)
    await run.done()
    assert [(one.model, one.begin_s, one.end_s) for one in run.sessions] == [
        ("a", 0.0, 7.0),
        ("b", 7.0, 14.0),
    ]


async def _stepped(run: Run, seconds: float) -> None:
    run.timers.step(seconds)


async def test_no_turn_of_the_event_loop_does_much_for_a_long_question() -> None:
    tokenizer, words, turns = WordTokenizer(), 20_000, Turns()
    model = ServedModel(
        "m", ScriptedEngine(tokenizer, lambda _: Script("Yes.")), tokenizer, 2 * words
    )
    messages = [{"role": "user", "content": "word " * words}]
    with counted(turns):
        output = await answer_prompt(
            model, BatchPrompt("q", "proposer", "m", messages, Sampling().params(0))
        )
    assert (output.text, output.prompt_tokens > words) == ("Yes.", True)
    assert 0 < turns.most < words, turns.most


async def test_no_turn_of_the_event_loop_writes_down_many_prompts_that_are_given_up() -> None:
    prompts, turns = 2000, Turns()
    run = Run(ScriptedWorkers(unloadable=lambda *_: True), [{"a": prompts}])
    with counted(turns):
        await run.running.run()
    assert len(run.outputs) == prompts and all(output.error for output in run.outputs)
    assert 0 < turns.most < prompts, turns.most
