import asyncio
import random
from collections import abc
from collections.abc import Callable

import pytest

from shell_router.files.read import check
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.standins.kv_capacity import Sequence
from shell_router.standins.simulated.costs import DecodeCosts
from shell_router.standins.simulated.decode import DecodeEngine
from shell_router.standins.simulated.processor import Job, Processor

Progress = list[tuple[float, int]]


class Batch:
    """A decode engine, and the progress that each sequence reports: when, and how many tokens it
    had written.

    Preempted sequences join again when they are admitted, with `again_tokens` more tokens.
    """

    def __init__(self, costs: DecodeCosts, again_tokens: int = 1) -> None:
        self.engine = DecodeEngine(costs, Processor())
        self._again_tokens = again_tokens
        self.loop = asyncio.get_running_loop()
        self.progress: list[Progress] = []
        self._open: list[asyncio.Task[None]] = []

    def ask(
        self,
        at_s: float,
        prompt: int,
        wanted: int,
        interval: int = 1,
        gives_up_s: float | None = None,
        drafts: tuple[float, int] = (1, 1),
    ) -> None:
        progress: Progress = []
        self.progress.append(progress)
        self._open.append(
            asyncio.create_task(
                self._one(at_s, prompt, wanted, interval, gives_up_s, drafts, progress)
            )
        )

    async def _one(
        self,
        at_s: float,
        prompt: int,
        wanted: int,
        interval: int,
        gives_up_s: float | None,
        drafts: tuple[float, int],
        progress: Progress,
    ) -> None:
        await asyncio.sleep(at_s)
        news = asyncio.Event()

        def on_progress(written: int) -> None:
            progress.append((round(self.loop.time(), 9), written))
            if written == wanted:
                news.set()

        sequence = Sequence(prompt, wanted, interval, on_progress, news.set)
        sequence.per_pass, sequence.width = drafts
        tokens = 1
        try:
            async with asyncio.timeout(None if gives_up_s is None else gives_up_s - at_s):
                while sequence.written < wanted:
                    await self.engine.allocate(sequence)
                    self.engine.add(sequence, tokens)
                    await news.wait()
                    news.clear()
                    tokens = self._again_tokens
        except TimeoutError:
            pass
        finally:
            self.engine.free(sequence)

    async def ended(self) -> list[Progress]:
        await asyncio.gather(*self._open)
        return self.progress


def progress(
    costs: DecodeCosts, *asked: abc.Sequence[float], again_tokens: int = 1
) -> list[Progress]:
    async def run() -> list[Progress]:
        batch = Batch(costs, again_tokens)
        for one in asked:
            batch.ask(*one)  # type: ignore[arg-type]
        return await batch.ended()

    return run_virtual(run())


def test_the_first_token_comes_with_the_prompt_and_each_further_one_with_a_step() -> None:
    assert progress(DecodeCosts(step_s=2.0), (1, 10, 4)) == [[(1, 1), (3, 2), (5, 3), (7, 4)]]


def test_a_step_takes_longer_with_every_sequence_and_every_token_before_it() -> None:
    costs = DecodeCosts(step_s=1.0, sequence_s=0.5, context_s=0.01)
    # the second step reads one token more of each
    expected = [(0, 1), (1 + 1 + 0.01 * (11 + 21), 2), (2 * (1 + 1 + 0.01 * (11 + 21)) + 0.02, 3)]
    first, second = progress(costs, (0, 10, 3), (0, 20, 3))
    assert first == second == [(pytest.approx(at_s), written) for at_s, written in expected]


def test_a_sequence_that_comes_during_a_step_joins_at_its_end() -> None:
    first, second = progress(DecodeCosts(step_s=1.0), (0, 1, 4), (1.5, 1, 3))
    assert first == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert second == [(2, 1), (3, 2), (4, 3)]


def test_a_sequence_that_gives_up_leaves_the_batch_with_the_step_that_has_begun() -> None:
    costs = DecodeCosts(step_s=0.0, sequence_s=1.0)
    first, second = progress(costs, (0, 1, 4), (0, 1, 100, 1, 2.5))
    assert first == [(0, 1), (2, 2), (4, 3), (5, 4)]
    assert second == [(0, 1), (2, 2)]


def test_a_sequence_is_heard_of_at_its_first_token_then_as_often_as_asked_and_at_its_last() -> None:
    assert progress(DecodeCosts(step_s=1.0), (0, 1, 9, 4)) == [[(0, 1), (4, 5), (8, 9)]]
    assert progress(DecodeCosts(step_s=1.0), (0, 1, 8, 4)) == [[(0, 1), (4, 5), (7, 8)]]
    assert progress(DecodeCosts(step_s=1.0), (0, 1, 1, 4)) == [[(0, 1)]]


def test_a_pass_that_verifies_drafts_computes_more_tokens_and_gives_several() -> None:
    costs = DecodeCosts(step_s=1.0, sequence_s=0.5, context_s=0.01)
    first_s = 1 + 4 * 0.5 + 0.01 * 11
    second_s = 1 + 4 * 0.5 + 0.01 * 13
    (one,) = progress(costs, (0, 10, 6, 1, None, (2.5, 4)))
    assert one == [(0, 1), (pytest.approx(first_s), 3), (pytest.approx(first_s + second_s), 6)]


def test_others_of_the_batch_wait_for_a_pass_that_verifies_drafts() -> None:
    costs = DecodeCosts(step_s=0.0, sequence_s=1.0)
    plain, drafted = progress(costs, (0, 1, 4), (0, 1, 9, 1, None, (4, 8)))
    assert plain == [(0, 1), (9, 2), (18, 3), (19, 4)]
    assert drafted == [(0, 1), (9, 5), (18, 9)]


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("reserved_tokens", [None, 0, 3])
@pytest.mark.parametrize("seed", range(20))
def test_how_often_sequences_are_heard_of_changes_nothing_of_when_they_end(
    seed: int, reserved_tokens: int | None, drafting: bool
) -> None:
    draws = random.Random(seed)
    room = 200 if reserved_tokens is None else 80
    # with drafts contexts grow unevenly, by their mean where steps are taken together
    context_s = 0.0 if drafting else 0.01
    costs = DecodeCosts(
        1.0, 0.1, context_s, cache_tokens=room, max_batch_size=4, reserved_tokens=reserved_tokens
    )
    drafts = [
        draws.choice(((1, 1), (2.3, 4), (7.5, 16))) if drafting else (1, 1) for _ in range(12)
    ]
    asked = [
        (
            draws.uniform(0, 60),
            draws.randint(1, 50),
            draws.randint(1, 40),
            draws.choice((None, 90.0)),
        )
        for _ in range(12)
    ]

    def run(interval: int) -> tuple[list[Progress], int]:
        async def batched() -> tuple[list[Progress], int]:
            batch = Batch(costs)
            for (at_s, prompt, wanted, until), drafted in zip(asked, drafts, strict=True):
                batch.ask(at_s, prompt, wanted, interval, until, drafted)
            ended = await batch.ended()
            await asyncio.sleep(100)  # what the last one began before it gave up
            assert batch.engine.used_tokens == 0
            return ended, batch.engine.written

        return run_virtual(batched())

    # steps taken together must be the steps taken one by one
    (one_by_one, written), (together, written_together) = run(1), run(1000)
    assert written_together == written
    for every, few, (_, _, wanted, _) in zip(one_by_one, together, asked, strict=True):
        ends = {tokens: at_s for at_s, tokens in every if tokens in (1, wanted)}
        assert {tokens: at_s for at_s, tokens in few if tokens in (1, wanted)} == pytest.approx(
            ends
        )


def test_a_sequence_waits_for_room_for_all_that_it_will_write() -> None:
    costs = DecodeCosts(step_s=1.0, cache_tokens=20)
    first, second, third = progress(costs, (0, 10, 5), (0, 10, 5), (0, 2, 2))
    assert first[-1] == (4, 5)
    assert second[0] == (4, 1)
    assert third[0] == (4, 1), "it came later, and does not overtake"


def test_no_more_sequences_decode_at_once_than_there_are_places() -> None:
    costs = DecodeCosts(step_s=1.0, max_batch_size=2)
    assert [one[0][0] for one in progress(costs, (0, 1, 4), (0, 1, 3), (0, 1, 3))] == [0, 0, 2]


def test_one_that_never_fits_goes_alone() -> None:
    costs = DecodeCosts(step_s=1.0, cache_tokens=10)
    first, second = progress(costs, (0, 50, 3), (0, 5, 2))
    assert first[-1] == (2, 3)
    assert second[0] == (2, 1)


def test_a_sequence_that_gives_up_waiting_delays_no_other() -> None:
    costs = DecodeCosts(step_s=1.0, cache_tokens=20)
    _, second, third = progress(costs, (0, 5, 10), (0, 15, 5, 1, 2.5), (0, 2, 2))
    assert second == []
    assert third[0] == (3, 1), (
        "at the end of the step that had begun when the one before it gave up"
    )


def test_tokens_and_times_are_counted() -> None:
    async def run() -> tuple[int, float, float]:
        batch = Batch(DecodeCosts(step_s=1.0))
        batch.ask(0, 1, 5)
        batch.ask(0, 1, 3)
        batch.ask(10, 1, 2)
        await batch.ended()
        return batch.engine.written, batch.engine.busy_s, batch.engine.batch_s

    assert run_virtual(run()) == (10, pytest.approx(5), pytest.approx(2 * 2 + 2 + 1))


def test_sequences_that_are_let_in_by_their_prompts_lose_room_where_it_runs_out() -> None:
    costs = DecodeCosts(step_s=1.0, cache_tokens=20, reserved_tokens=0)
    first, second = progress(costs, (0, 8, 6), (0, 8, 6))
    assert first == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert second == [(0, 1), (1, 2), (5, 3), (6, 4), (7, 5), (8, 6)], (
        "its prompt and two tokens are prefilled at 5 s"
    )
    _, reloaded = progress(costs, (0, 8, 6), (0, 8, 6), again_tokens=0)
    assert reloaded == [(0, 1), (1, 2), (6, 3), (7, 4), (8, 5), (9, 6)]


def test_the_shortest_output_is_preempted_and_is_admitted_first_again() -> None:
    costs = DecodeCosts(step_s=1.0, cache_tokens=24, reserved_tokens=0)
    old, young, later = progress(costs, (0, 6, 10), (2, 8, 8), (4, 1, 2))
    assert old == [(at_s, at_s + 1) for at_s in range(10)]
    assert young[:5] == [(2, 1), (3, 2), (4, 3), (5, 4), (9, 5)], "its room is taken at 5 s"
    assert later[0] == (9, 1), "it does not overtake, though its prompt would fit"


def test_room_that_is_reserved_for_all_keeps_others_out() -> None:
    costs = DecodeCosts(step_s=1.0, cache_tokens=20, reserved_tokens=5)
    first, second = progress(costs, (0, 8, 6), (0, 8, 6))
    assert first[-1] == (5, 6)
    assert second[0] == (5, 1)


def test_the_last_sequence_keeps_its_room_however_long_it_gets() -> None:
    costs = DecodeCosts(step_s=1.0, cache_tokens=10, reserved_tokens=0)
    (only,) = progress(costs, (0, 8, 6))
    assert only[-1] == (5, 6)


@pytest.mark.parametrize("interval", [1, 1000])
@pytest.mark.parametrize(
    ("reserved_tokens", "expected"),
    [
        (0, [14 + 34, 16 + 36, 18 + 38 + 7, 22, 0]),
        (None, [30 + 39, 30 + 39 + 8, 30 + 39 + 8, 30, 0]),
    ],
)
def test_capacity_is_reported_as_it_is_claimed_however_few_pieces_come(
    interval: int, reserved_tokens: int | None, expected: list[int]
) -> None:
    async def run() -> list[int]:
        batch, taken = (
            Batch(DecodeCosts(1.0, cache_tokens=1000, reserved_tokens=reserved_tokens)),
            list[int](),
        )
        batch.ask(0.0, 10, 20, interval)
        batch.ask(0.0, 30, 9, interval)
        batch.ask(5.2, 5, 3, interval)
        for wait_s in (3.5, 2.0, 2.0, 4.0):
            await asyncio.sleep(wait_s)
            taken.append(batch.engine.used_tokens)
        await batch.ended()
        return [*taken, batch.engine.used_tokens]

    assert run_virtual(run()) == expected


class CountingProcessor(Processor):
    """Counts the jobs that it was given."""

    jobs = 0

    def start(self, seconds: float, done: Callable[[], None]) -> Job:
        self.jobs += 1
        return super().start(seconds, done)


@pytest.mark.parametrize("reserved_tokens", [None, 0])
def test_a_sequence_that_left_ends_no_steps_of_others(reserved_tokens: int | None) -> None:
    def jobs(interval: int) -> int:
        async def run() -> int:
            processor = CountingProcessor()
            engine = DecodeEngine(DecodeCosts(1.0, reserved_tokens=reserved_tokens), processor)
            stays = Sequence(10, 100, 100, lambda _: None)
            leaves = Sequence(10, 100, interval, lambda _: None)
            for one in (stays, leaves):
                await engine.allocate(one)
                engine.add(one)
            await asyncio.sleep(3.5)
            engine.free(leaves)
            await asyncio.sleep(200)
            assert engine.written == 100 + 5
            return processor.jobs

        return run_virtual(run())

    assert jobs(interval=10) == jobs(interval=100)


@pytest.mark.parametrize("reserved_tokens", [None, 0, 5])
@pytest.mark.parametrize("seed", range(10))
def test_all_room_is_free_when_all_have_ended_or_given_up(
    seed: int, reserved_tokens: int | None
) -> None:
    draws = random.Random(seed)
    costs = DecodeCosts(1.0, cache_tokens=60, max_batch_size=5, reserved_tokens=reserved_tokens)

    async def run() -> tuple[tuple[int, int], tuple[int, int], int]:
        batch = Batch(costs)
        for _ in range(20):
            at_s = draws.uniform(0, 40)
            until_s = draws.choice((None, at_s + draws.uniform(1, 30)))
            batch.ask(
                at_s, draws.randint(1, 30), draws.randint(1, 30), draws.choice((1, 7)), until_s
            )
        for written in await batch.ended():
            assert [tokens for _, tokens in written] == sorted({tokens for _, tokens in written})
        engine = batch.engine
        return (engine.used_tokens, engine.waiting_tokens), engine.requests, engine.preemptions

    tokens, requests, preemptions = run_virtual(run())
    assert (tokens, requests) == ((0, 0), (0, 0))
    assert reserved_tokens is not None or not preemptions


def test_a_negative_reserve_is_refused() -> None:
    _, (problem,) = check(DecodeCosts, {"step_s": 1.0, "reserved_tokens": -1})
    assert problem.at == ("reserved_tokens",)
