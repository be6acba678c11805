import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.batch.journal import Journal, Output, open_journal
from shell_router.batch.planner import BatchPlan, Workload, plan_longest_first
from shell_router.batch.pool import Aggregating, Pool, PoolModel, PoolWorker
from shell_router.batch.profile import ModelProfile, PoolProfile
from shell_router.batch.prompts import Batch, Result, as_lines
from shell_router.batch.questions import Question, Questions, Refused
from shell_router.batch.run import BatchReport, PoolRun
from shell_router.batch.sessions import SPANNING, Follow, Sessions, Stage
from shell_router.config import PairLaunch, PairSettings
from shell_router.errors import ConfigError, EngineRejected
from shell_router.standins.embedded.settings import EmbeddedSection
from tests.fakes.disk import full_disk
from tests.fakes.moa import WordTokenizer
from tests.fakes.pools import ScriptedWorkers
from tests.fakes.scripted_engine import Hold, Script
from tests.fakes.timers import SteppedTimers

COST = ModelProfile(5.0, 10.0, 20.0, 1.0, 0.01, 0.02)
PROFILE = PoolProfile(dict.fromkeys("abc", COST), COST)
EXPERTS = ("a", "b", "c")
DEPENDS_ON = {"questions": "some"}


class Killed(Exception):
    """The process is gone."""


def saying(answers: Mapping[str, str]) -> Callable[[str, str], Script]:
    """Models that answer what stands under model and question, as in "a1"; an aggregator's under
    "!1".
    """

    def says(model: str, text: str) -> Script:
        aggregates = text.startswith("Several assistants")
        number = text.rsplit("Question:\n", maxsplit=1)[-1][1] if aggregates else text[1]
        said = answers.get(("!" if aggregates else model) + number, "1")
        return (
            Script("", error=EngineRejected(said, status=400))
            if said == "refused"
            else Script(f"Answer: {said}.")
        )

    return says


def batch(questions: int = 3, tau: float | None = 1.0, **fields: object) -> Batch:
    """Questions `Q0?`, `Q1?` and so on, all answered by a, b and c, whose right answer is 1."""
    asked = [Question(str(n), f"Q{n}?", answer="1", line=n + 1) for n in range(questions)]
    return Batch(
        pool(tau, **fields), Questions(tuple(asked), (), ""), {one.id: EXPERTS for one in asked}
    )


def pool(tau: float | None = 1.0, places: int = 2, **fields: object) -> Pool:
    """Models a, b and c on `places` workers; b aggregates."""
    models = {name: PoolModel(Path(name)) for name in EXPERTS}
    workers = (PoolWorker(embedded=EmbeddedSection()),) * places
    aggregate = None if tau is None else Aggregating("b", tau)
    made = Pool(models, workers, capacity=3, concurrency=2, aggregate=aggregate)
    return replace(made, **fields)  # type: ignore[arg-type]


@dataclass
class Started(Follow):
    """What a start of a run was seen to do."""

    workers: ScriptedWorkers = field(default_factory=ScriptedWorkers)
    kill_after: float = float("inf")
    outputs: list[Output] = field(default_factory=list)
    stages: Sequence[Stage] = ()
    announced: list[Stage] = field(default_factory=list)

    def on_output(self, output: Output) -> None:
        self.outputs.append(output)
        if len(self.outputs) >= self.kill_after:
            raise Killed

    def on_stage(self, stage: Stage, _sessions: Sessions) -> None:
        self.announced.append(stage)

    async def run(self, batch: Batch, folder: Path) -> list[Result]:
        """Run what the folder lacks; the results."""
        with open_journal(folder, DEPENDS_ON) as journal:
            return (await self.on(batch, journal)).results

    async def on(
        self, batch: Batch, journal: Journal, profile: PoolProfile = PROFILE
    ) -> BatchReport:
        if self.kill_after <= 0:
            raise Killed
        async with asyncio.timeout(20):
            finished = await PoolRun(
                batch,
                self.workers,
                profile,
                journal,
                plan_longest_first,
                self,
                SteppedTimers().clock,
            ).run()
        assert not self.workers.open
        self.stages = finished.stages
        return finished


async def test_the_plan_counts_the_start_of_a_workers_engine_once_and_the_aggregators_has_it_up(
    tmp_path: Path,
) -> None:
    started = Started()
    with open_journal(tmp_path, DEPENDS_ON) as journal:
        await started.on(batch(tau=2.0), journal, replace(PROFILE, first_s=40.0, together_s=10.0))
    proposers, aggregator = (stage.plan for stage in started.stages)
    begins_s = {one.worker: one.end_s for one in reversed(proposers.sessions)}
    loaded_s = COST.load_s + 40.0 + 10.0
    assert len(begins_s) == 2 and all(
        loaded_s < end_s < loaded_s + COST.load_s for end_s in begins_s.values()
    )
    assert aggregator.makespan_s < 40.0


async def outcome(
    answers: Mapping[str, str], folder: Path, asked: Batch | None = None
) -> tuple[Started, list[Result]]:
    """A whole run in one go."""
    started = Started(ScriptedWorkers(saying(answers)))
    return started, await started.run(asked or batch(), folder)


def drafts(started: Started) -> list[str]:
    """What the aggregator was asked."""
    return sorted(text for _, text in started.workers.asked if text.startswith("Several"))


async def test_every_expert_is_asked_once_and_the_aggregator_where_they_do_not_agree(
    tmp_path: Path,
) -> None:
    started, results = await outcome({"a1": "2", "!1": "7"}, tmp_path)
    asked = sorted((one.question, one.role, one.model) for one in started.outputs)
    wanted = [(str(n), "proposer", model) for n in range(3) for model in EXPERTS]
    assert asked == sorted([*wanted, ("1", "aggregator", "b")])
    assert [(one.by, one.answer, one.right, one.confidence) for one in results] == [
        ("proposers", "1", True, 1.0),
        ("aggregator", "7", False, pytest.approx(2 / 3)),
        ("proposers", "1", True, 1.0),
    ]
    assert [
        (stage.role, sum(one.prompts for one in stage.sessions)) for stage in started.stages
    ] == [
        ("proposer", 9),
        ("aggregator", 1),
    ]
    assert [stage.plan for stage in started.announced] == [stage.plan for stage in started.stages]


async def test_an_output_tells_how_sure_its_model_was_and_how_much_it_read_and_wrote(
    tmp_path: Path,
) -> None:
    started, (result,) = await outcome({}, tmp_path, batch(1))
    one, wrote = started.outputs[0], len(WordTokenizer().encode("Answer: 1."))
    assert (one.text, one.completion_tokens) == ("Answer: 1.", wrote)
    assert one.prompt_tokens == len(WordTokenizer().encode("<user>Q0?<assistant>"))
    assert one.confidence == pytest.approx(math.exp(-0.1))
    assert [opinion.tokens for opinion in result.proposals] == [wrote] * 3


async def test_the_aggregator_reads_the_drafts_in_the_order_of_the_experts(tmp_path: Path) -> None:
    started, _ = await outcome({"a0": "2", "c0": "3"}, tmp_path, batch(1))
    (read,) = drafts(started)
    assert (
        "Question:\nQ0?\n\nDraft 1:\nAnswer: 2.\n\nDraft 2:\nAnswer: 1.\n\nDraft 3:\nAnswer: "
        "3.\n\nNow"
    ) in read


async def test_an_expert_that_failed_counts_but_is_not_read(tmp_path: Path) -> None:
    started, (result,) = await outcome({"a0": "refused", "!0": "5"}, tmp_path, batch(1))
    (read,) = drafts(started)
    assert "Draft 1:\nAnswer: 1.\n\nDraft 2:\nAnswer: 1.\n\nNow" in read
    assert (result.by, result.answer) == ("aggregator", "5")
    assert result.confidence == pytest.approx(2 / 3)
    assert result.error == "a: refused"
    assert [(one.model, one.answer, one.right, one.error) for one in result.proposals] == [
        ("a", None, None, "refused"),
        ("b", "1", True, ""),
        ("c", "1", True, ""),
    ]


async def test_where_the_aggregator_fails_the_plurality_stands_and_the_result_says_so(
    tmp_path: Path,
) -> None:
    _, (result,) = await outcome({"a0": "2", "!0": "refused"}, tmp_path, batch(1))
    assert (result.by, result.answer, result.winner) == ("proposers", "1", 2)
    assert result.error == "The aggregator did not answer: refused"


async def test_where_no_model_answers_no_other_is_asked(tmp_path: Path) -> None:
    started, (result,) = await outcome(
        dict.fromkeys(("a0", "b0", "c0"), "refused"), tmp_path, batch(1)
    )
    assert not drafts(started)
    assert (result.by, result.text, result.answer, result.winner, result.right) == (
        "none",
        "",
        None,
        None,
        False,
    )
    assert result.error == "a: refused b: refused c: refused"


async def test_drafts_without_an_answer_go_to_the_aggregator_or_the_last_stands(
    tmp_path: Path,
) -> None:
    silent = dict.fromkeys(("a0", "b0"), "") | {"c0": "refused"}
    started, (result,) = await outcome({**silent, "!0": "5"}, tmp_path / "with", batch(1))
    assert len(drafts(started)) == 1
    assert (result.by, result.answer, result.confidence) == ("aggregator", "5", 0.0)
    _, (alone,) = await outcome(silent, tmp_path / "without", batch(1, tau=None))
    assert (alone.by, alone.text, alone.answer, alone.winner) == (
        "proposers",
        "Answer: .",
        None,
        None,
    )


async def test_without_an_aggregator_the_plurality_answers(tmp_path: Path) -> None:
    started, results = await outcome(
        {"a0": "2", "b0": "2", "c1": "3", "a1": "2"}, tmp_path, batch(2, tau=None)
    )
    assert [(one.by, one.answer, one.error) for one in results] == [
        ("proposers", "2", ""),
        ("proposers", "3", ""),
    ]
    assert [stage.role for stage in started.stages] == ["proposer"]


async def test_refused_lines_stand_among_the_results_in_the_order_of_the_file(
    tmp_path: Path,
) -> None:
    questions = (Question("x", "Q0?", line=2), Question("y", "Q1?", line=4))
    refused = (Refused(5, None, "bad"), Refused(1, "r", "worse"))
    asked = Batch(pool(), Questions(questions, refused, ""), {"x": ("a",), "y": ("c", "b")})
    results = await Started(ScriptedWorkers(saying({}))).run(asked, tmp_path)
    assert [(one.line, one.id, one.by, one.error) for one in results] == [
        (1, "r", "none", "worse"),
        (2, "x", "proposers", ""),
        (4, "y", "proposers", ""),
        (5, None, "none", "bad"),
    ]
    assert [[one.model for one in result.proposals] for result in results] == [
        [],
        ["a"],
        ["c", "b"],
        [],
    ]
    assert [one.right for one in results] == [None] * 4


async def test_models_get_their_system_prompt_and_draw_by_seeds_of_their_own(
    tmp_path: Path,
) -> None:
    models = {**pool().models, "b": PoolModel(Path("b"), "Think.")}
    one, other = (replace(batch(2, models=models), seed=seed) for seed in (0, 1))
    assert [[m["role"] for m in p.messages] for p in one.proposer_prompts()[:2]] == [
        ["user"],
        ["system", "user"],
    ]
    seeds = [
        prompt.sampling["sampling_seed"]
        for made in (one, other)
        for prompt in made.proposer_prompts()
    ]
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**31 for seed in seeds)
    again = [prompt.sampling["sampling_seed"] for prompt in one.proposer_prompts()]
    assert again == seeds[:6]


async def test_another_tau_asks_only_what_is_missing(tmp_path: Path) -> None:
    answers = {"a1": "2", "a2": "2", "b2": "3", "!0": "8", "!1": "8", "!2": "8"}
    asked = []
    for tau in (0.67, 1.0, 2.0, 0.67):
        started, results = await outcome(answers, tmp_path, batch(tau=tau))
        asked.append(
            [(one.question, one.role) for one in started.outputs if one.role == "aggregator"]
        )
    assert asked == [[("2", "aggregator")], [("1", "aggregator")], [("0", "aggregator")], []]
    assert [one.by for one in results] == ["proposers", "proposers", "aggregator"]


async def test_what_failed_is_tried_again_and_the_aggregator_reads_what_comes_of_it(
    tmp_path: Path,
) -> None:
    await outcome({"a0": "refused", "b0": "2"}, tmp_path, batch(1))
    started, (result,) = await outcome({"a0": "3", "b0": "2", "!0": "9"}, tmp_path, batch(1))
    assert [(one.role, one.model) for one in started.outputs] == [
        ("proposer", "a"),
        ("aggregator", "b"),
    ]
    assert "Draft 1:\nAnswer: 3." in drafts(started)[0]
    assert (result.by, result.answer, result.error) == ("aggregator", "9", "")


def answered_somehow(seed: int) -> Callable[[str, str], Script]:
    """Each model answers one of three things, or is refused, as its text and the seed decide."""

    def says(model: str, text: str) -> Script:
        drawn = sha256(f"{seed} {model} {text}".encode()).digest()[0] % 7
        return (
            Script("", error=EngineRejected("not this", status=400))
            if drawn == 6
            else Script(f"Answer: {drawn % 3}.")
        )

    return says


async def whole_run(
    folder: Path, says: Callable[[str, str], Script], asked: Batch, kill_after: float
) -> list[Result]:
    return await Started(ScriptedWorkers(says), kill_after=kill_after).run(asked, folder)


@given(
    st.integers(0, 1000),
    st.sampled_from((None, 0.67, 1.0, 2.0)),
    st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=9)), max_size=5),
)
def test_however_often_it_is_killed_the_results_are_those_of_one_go(
    seed: int, tau: float | None, kills: list[tuple[int, bytes]]
) -> None:
    says, asked = answered_somehow(seed), batch(4, tau)
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        expected = as_lines(asyncio.run(whole_run(Path(one), says, asked, float("inf"))))
        for outputs, torn in kills:
            _killed(Path(other), says, asked, outputs, torn)
        assert as_lines(asyncio.run(whole_run(Path(other), says, asked, float("inf")))) == expected


def _killed(
    folder: Path, says: Callable[[str, str], Script], asked: Batch, outputs: int, torn: bytes
) -> None:
    """End a run after a number of outputs, in the middle of the next line."""
    try:
        asyncio.run(whole_run(folder, says, asked, outputs))
    except* Killed:
        pass
    with (folder / "outputs.jsonl").open("ab") as file:
        file.write(torn.replace(b"\n", b""))


async def test_killed_after_each_number_of_outputs_it_goes_on_to_the_same_results(
    tmp_path: Path,
) -> None:
    answers = {"a1": "2", "c2": "4", "b3": "refused", "!1": "7"}
    whole, expected = await outcome(answers, tmp_path / "one", batch(4))
    lines = (tmp_path / "one" / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == len(whole.outputs) == 12 + 3
    for number in range(len(lines) + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "outputs.jsonl").write_bytes(b"".join(lines[:number]) + b'{"question": "to')
        started, results = await outcome(answers, folder, batch(4))
        assert as_lines(results) == as_lines(expected)
        answered = {one.key for one in whole.outputs[:number] if not one.error}
        assert not answered & {one.key for one in started.outputs}


@pytest.mark.parametrize("room", [0, 1, 150, 200, 400, 500])
async def test_a_journal_that_cannot_write_ends_the_run_with_its_error_as_it_is(
    tmp_path: Path, room: int
) -> None:
    started, file = Started(ScriptedWorkers(saying({"a0": "2"}))), tmp_path / "outputs.jsonl"
    with (
        full_disk(room),
        pytest.raises(
            ConfigError, match=r"outputs\.jsonl: File too large\. Free disk space and run"
        ),
    ):
        await started.on(batch(1), Journal(file))
    assert not started.workers.open
    assert len(asyncio.all_tasks()) == 1
    assert len(started.outputs) <= (file.read_bytes() if file.exists() else b"").count(b"\n") < 4


class SlowJournal(Journal):
    """Its first write takes until it is released."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.writing, self.released = threading.Event(), threading.Event()
        self.writers: set[threading.Thread] = set()

    def add(self, *outputs: Output) -> None:
        self.writers.add(threading.current_thread())
        self.writing.set()
        assert self.released.wait(60)
        super().add(*outputs)


async def test_outputs_are_written_in_threads_in_the_order_in_which_they_came(
    tmp_path: Path,
) -> None:
    started, file = Started(), tmp_path / "outputs.jsonl"
    journal = SlowJournal(file)
    journal.released.set()
    await started.on(batch(9, tau=None), journal)
    assert threading.main_thread() not in journal.writers
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert [line["question"] for line in lines] == [one.question for one in started.outputs]
    assert len(lines) == 27


async def test_what_was_answered_while_the_disk_was_slow_is_written_when_the_run_is_cancelled(
    tmp_path: Path,
) -> None:
    started, file = Started(), tmp_path / "outputs.jsonl"
    journal = SlowJournal(file)
    running = asyncio.create_task(started.on(batch(9, tau=None), journal))
    assert await asyncio.to_thread(journal.writing.wait, 60)
    for _ in range(1000):  # until every worker waits for the disk
        await asyncio.sleep(0)
    answered = len(started.workers.asked)
    running.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    journal.released.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(file.read_bytes().splitlines()) == answered > 1


class InPlace(ThreadPoolExecutor):
    """Runs what it is given at once, so that a run takes as many turns of the event loop however
    slow the disk is.
    """

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(work(*arguments, **named))
        except Exception as error:
            done.set_exception(error)
        return done


async def test_cancelled_at_any_moment_a_batch_leaves_nothing_open_and_goes_on(
    tmp_path: Path,
) -> None:
    asyncio.get_running_loop().set_default_executor(InPlace())
    answers = {"a0": "2", "b1": "refused"}
    for turns in count():
        workers = ScriptedWorkers(
            saying(answers), unloadable=lambda worker, model: (worker, model) == (0, "a")
        )
        started = Started(workers)
        task = asyncio.create_task(started.run(batch(2), tmp_path / str(turns)))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not started.workers.open
        assert len(asyncio.all_tasks()) == 1
        _, results = await outcome(answers, tmp_path / str(turns), batch(2))
        assert [one.by for one in results] == ["aggregator", "aggregator"]
    assert turns > 10


async def test_a_model_without_a_profile_is_reported_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    started = Started()
    with open_journal(tmp_path, DEPENDS_ON) as journal:
        with pytest.raises(ConfigError, match="The profile has no model 'c'"):
            await started.on(batch(), journal, PoolProfile({"a": COST, "b": COST}, COST))
        assert not started.workers.loads
        with pytest.raises(ConfigError, match="The profile has no aggregator"):
            await started.on(batch(tau=2.0), journal, PoolProfile(PROFILE.models))


async def test_no_two_models_are_held_by_a_worker_between_the_stages(tmp_path: Path) -> None:
    hold = Hold(first=0)
    started = Started(ScriptedWorkers(saying({"a0": "2"}), pace=hold.pace))
    running = asyncio.create_task(started.run(batch(1, places=1), tmp_path))
    await hold.until_waiting()
    assert list(started.workers.open) == [0]
    hold.release()
    await running
    assert [model for _, model in started.workers.loads[-1:]] == ["b"]


def test_a_plan_is_asked_for_only_what_is_missing(tmp_path: Path) -> None:
    planned: list[Workload] = []

    def planner(workload: Workload) -> BatchPlan:
        planned.append(workload)
        return plan_longest_first(workload)

    async def ran() -> None:
        with open_journal(tmp_path, DEPENDS_ON) as journal:
            for number in range(2):
                journal.add(Output(str(number), "proposer", "a", "Answer: 1."))
            workers = ScriptedWorkers(saying({}))
            await PoolRun(
                batch(replan_above=0.0),
                workers,
                PROFILE,
                journal,
                planner,
                Follow(),
                SteppedTimers().clock,
            ).run()

    asyncio.run(ran())
    assert [{one.name: one.prompts for one in work.models} for work in planned] == [
        {"a": 1, "b": 3, "c": 3},
        {},
    ]


async def test_a_tensor_parallel_aggregator_runs_on_the_worker_that_spans_all(
    tmp_path: Path,
) -> None:
    workers = tuple(
        PoolWorker(
            pair=PairSettings(f"http://h:{port}", f"http://h:{port + 1}", launch=PairLaunch())
        )
        for port in (1, 3)
    )
    aggregate = Aggregating("b", 2.0, parallel="tensor")
    started, _ = await outcome({}, tmp_path, batch(3, workers=workers, aggregate=aggregate))
    assert [worker for worker, _ in started.workers.loads if worker == SPANNING] == [SPANNING]
    assert started.workers.loads[-1] == (SPANNING, "b")
    assert [one.worker for one in started.stages[1].plan.sessions] == [0]
    assert started.workers.most_running == 3, (
        "with room for two prompts per worker, all three are asked at once"
    )


@pytest.mark.parametrize(("pairs", "alone"), [(True, True), (False, False)])
async def test_a_pair_that_still_holds_the_aggregator_answers_alone_where_a_load_is_dear(
    tmp_path: Path, pairs: bool, alone: bool
) -> None:
    pair = PairSettings("http://h:1", "http://h:2", launch=PairLaunch())
    workers = (PoolWorker(pair=pair) if pairs else PoolWorker(embedded=EmbeddedSection()),) * 2
    dear = replace(COST, load_s=90.0)
    started = Started()
    with open_journal(tmp_path, DEPENDS_ON) as journal:
        await started.on(
            batch(tau=2.0, workers=workers), journal, PoolProfile(dict.fromkeys("abc", COST), dear)
        )
    last = {one.worker: one.model for one in started.stages[0].sessions}
    (aggregator,) = started.stages[1].plan.sessions
    assert (last[aggregator.worker] == "b" and aggregator.end_s < dear.load_s) == alone


async def test_the_aggregator_may_take_all_workers_however_few_its_prompts(tmp_path: Path) -> None:
    replicas: list[int] = []

    def planner(workload: Workload) -> BatchPlan:
        replicas.extend(proposer.replica_cap(workload.workers) for proposer in workload.models)
        return plan_longest_first(workload)

    with open_journal(tmp_path, DEPENDS_ON) as journal:
        asked, workers = batch(tau=2.0, places=4), ScriptedWorkers(saying({}))
        await PoolRun(
            asked, workers, PROFILE, journal, planner, Follow(), SteppedTimers().clock
        ).run()
    assert replicas == [1, 1, 1, 4]
