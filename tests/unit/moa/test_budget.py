"""Runs that may spend so many calls, tokens, dollars and seconds."""

import asyncio
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from agent_cache.accounts import AccountLimits, MemoryAccounts, Payment
from shell_router.core.budget import Allowance, Budget, Price, Purse
from shell_router.core.engine import Generation
from shell_router.core.events import AgentStopped
from shell_router.errors import BudgetExceeded
from shell_router.files.read import check
from shell_router.moa.requests import Answer
from shell_router.moa.spending import Account, Spending
from shell_router.topology import Graph, parse_topology
from tests.fakes.api_server import DUO
from tests.fakes.moa import Recorder, ScriptedMoa, ask
from tests.fakes.scripted_engine import Script
from tests.fakes.topologies import parse_steps

TREE = parse_topology(
    "name: tree\ntree: {shape: [4, 2, 1], models: [small]}\nearly_exit: off\n", source="tree.yaml"
)
WORDS = "one two three four five six seven eight nine ten eleven twelve"


async def run(
    moa: ScriptedMoa, topology: Graph, recorder: Recorder | None = None, **budget: float
) -> Answer:
    limits = Budget(**budget)  # type: ignore[arg-type]
    emit = (recorder or Recorder()).emit
    return await moa.executor.run(topology, ask(budget=limits), emit)


def count_calls(moa: ScriptedMoa) -> int:
    return sum(len(engine.generated) for engine in moa.engines.values())


@pytest.mark.parametrize(
    ("calls", "author"), [(6, "aggregator"), (5, "aggregator"), (4, "proposer"), (1, "proposer")]
)
async def test_no_more_calls_are_made_and_the_nearest_finished_output_answers(
    calls: int, author: str
) -> None:
    moa = ScriptedMoa()
    recorder = Recorder()
    answer = await run(moa, TREE, recorder, calls=calls)
    assert count_calls(moa) == calls
    assert answer.text.startswith(author)
    assert answer.reason == "length"
    assert "The budget left 'root' no money" in answer.warning
    assert answer.agents["root"].state == "budget"
    cut = {event.agent for event in recorder.of(AgentStopped) if event.why == "budget"}
    assert "root" in cut
    assert not moa.running


async def test_a_budget_that_suffices_changes_nothing() -> None:
    plain = await run(ScriptedMoa(), TREE)
    answer = await run(ScriptedMoa(), TREE, calls=7, tokens=100_000, seconds=60, cost=1)
    assert (answer.text, answer.reason, answer.warning) == (plain.text, "stop", "")
    assert {used.state for used in answer.agents.values()} == {"finished"}


async def test_a_root_that_writes_beyond_its_budget_answers_with_its_text_so_far() -> None:
    moa = ScriptedMoa({"root": WORDS})
    whole = await run(ScriptedMoa({"root": WORDS}), DUO)
    spent = sum(used.prompt_tokens + used.completion_tokens for used in whole.agents.values())
    answer = await run(moa, DUO, tokens=spent - 4)
    assert WORDS.startswith(answer.text)
    assert answer.text.strip()
    assert answer.reason == "length"
    used = sum(used.prompt_tokens + used.completion_tokens for used in answer.agents.values())
    assert used <= spent - 4


async def test_dollars_are_counted_by_the_price_of_each_model() -> None:
    moa = ScriptedMoa()
    for alias, model in moa.models.items():
        moa.models[alias] = replace(model, price=Price(input=1.0, output=10.0, cached=0.5))
    answer = await run(moa, DUO)
    for used in answer.agents.values():
        new_tokens = used.prompt_tokens - used.cached_tokens
        micros = new_tokens + 0.5 * used.cached_tokens + 10 * used.completion_tokens
        assert used.cost == pytest.approx(micros / 1e6)
    total = sum(used.cost for used in answer.agents.values())
    assert (await run(moa, DUO, cost=2 * total)).reason == "stop"
    with pytest.raises(BudgetExceeded, match="cost 0 of"):
        await run(moa, DUO, cost=total / 1000)


async def test_nothing_finished_is_an_error_with_the_figures_and_the_spent_tokens() -> None:
    moa = ScriptedMoa()
    with pytest.raises(BudgetExceeded, match=r"tokens 0 of 3") as failed:
        await run(moa, DUO, tokens=3)
    assert count_calls(moa) == 0
    assert set(failed.value.spent) == set(DUO.agents)


async def test_the_tighter_of_the_requests_and_the_topologys_budget_holds() -> None:
    moa = ScriptedMoa()
    await run(moa, replace(TREE, budget=Budget(calls=2)), calls=5)
    assert count_calls(moa) == 2
    await run(moa, replace(TREE, budget=Budget(calls=5)), calls=3)
    assert count_calls(moa) == 5


@pytest.mark.parametrize("own", [{}, {"calls": 100}])
async def test_a_topology_that_a_step_asks_keeps_its_own_budget(own: dict[str, float]) -> None:
    tree = replace(TREE, budget=Budget(calls=2))
    steps = parse_steps(
        "start: whole\nsteps: {whole: {topology: tree}}", source="f.yaml", topologies={"tree": tree}
    )
    moa = ScriptedMoa()
    answer = await run(moa, steps, **own)
    assert (count_calls(moa), answer.reason) == (2, "length")


async def test_an_engine_that_keeps_the_lowered_limit_ends_with_the_same_warning() -> None:
    moa = ScriptedMoa()

    def answer_within(request: Generation) -> Script:
        words = WORDS.split()[: request.sampling["max_new_tokens"]]
        return Script(" ".join(words), reason="length" if len(words) < 12 else "stop")

    for engine in moa.engines.values():
        engine.answer = answer_within
    whole = await run(moa, DUO)
    spent = sum(used.prompt_tokens + used.completion_tokens for used in whole.agents.values())
    answer = await run(moa, DUO, tokens=spent - 4)
    assert answer.reason == "length"
    assert answer.text.strip() and WORDS.startswith(answer.text)
    assert "budget" in answer.warning
    assert answer.agents["root"].state == "budget"


def test_a_price_of_cached_tokens_is_not_negative() -> None:
    _, problems = check(Price, {"input": 1, "output": 1, "cached": -5})
    assert [problem.at for problem in problems] == [("cached",)]


def test_what_pays_exactly_for_a_first_token_pays_for_it() -> None:
    for prompt_tokens in range(1, 200):
        price = Price(0.4, 1.6)
        budget = Budget(cost=price.cost(prompt_tokens, 0, 0) + price.cost(0, 0, 1))
        assert Purse(budget).begin(price, prompt_tokens, 100) == 1


@pytest.mark.parametrize("ends", ["refused", "cancelled"])
async def test_a_call_that_an_account_does_not_pay_leaves_nothing_paid(ends: str) -> None:
    asked = asyncio.Event()
    goes_on = asyncio.Event()

    class Slow(MemoryAccounts):
        async def spend(self, tenant: str, name: str, payment: Payment, limits: Any) -> int:
            paid = await super().spend(tenant, name, payment, limits)
            if name == "second":
                asked.set()
                await goes_on.wait()
            return paid

    store = Slow(monotonic)
    limits = {"first": 1000, "second": 5 if ends == "refused" else 1000}
    accounts = [
        Account(store, "t", name, name, Allowance(10, most), 60.0) for name, most in limits.items()
    ]
    purse = Purse(Budget(calls=1, tokens=1000))
    task = asyncio.create_task(Spending(Price(1.0, 10.0), purse, accounts).begin(100, 500))
    await asked.wait()
    if ends == "cancelled":
        task.cancel()
    else:
        goes_on.set()
    await asyncio.wait({task})
    goes_on.set()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))  # type: ignore[arg-type]
    assert (purse.calls, purse.tokens, purse.cost) == (0, 0, 0)
    for account in accounts:
        payment = Payment(10, 0, 0, 5000, 0)
        assert (
            await store.spend(
                "t", account.name, payment, AccountLimits(10, limits[account.name], -1, 60.0)
            )
            == limits[account.name]
        )


async def test_steps_share_a_budget_and_the_last_output_answers() -> None:
    steps = parse_steps(
        "name: steps\nbudget: {calls: 1}\nstart: [{go: quick}]\nsteps:\n"
        "  quick: {model: small, then: [{go: careful}]}\n"
        "  careful: {model: large, precursors: [quick]}\n",
        source="steps.yaml",
    )
    moa = ScriptedMoa({"quick": "a quick one", "careful": "a careful one"})
    answer = await run(moa, steps)
    assert (answer.text, answer.reason, count_calls(moa)) == ("a quick one", "length", 1)
    assert "'quick' answers in its place" in answer.warning


async def test_the_end_of_the_time_leaves_the_best_output_or_says_that_there_is_none() -> None:
    never = asyncio.Event()

    async def pace(rid: str, piece: int) -> None:
        if rid.endswith(".root") and piece >= 0:
            await never.wait()

    moa = ScriptedMoa(pace=pace)
    answer = await run(moa, DUO, seconds=0.4)
    assert answer.text.startswith(("left", "right"))
    assert answer.agents["root"].state == "budget"

    async def stand_still(_: str, piece: int) -> None:
        if piece >= 0:
            await never.wait()

    with pytest.raises(BudgetExceeded, match=r"within 0.3 s"):
        await run(ScriptedMoa(pace=stand_still), DUO, seconds=0.3)


async def test_an_agent_that_thinks_in_its_last_pieces_is_cut_before_a_reader_begins() -> None:
    moa = ScriptedMoa({"left": Script(WORDS, piece_words=1), "right": Script(WORDS, piece_words=1)})
    with pytest.raises(BudgetExceeded, match="tokens"):
        await run(moa, DUO, tokens=16)
    assert moa.running == set()
