import asyncio
import random
from collections import Counter
from time import monotonic

from hypothesis import given
from hypothesis import strategies as st

from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import EngineUnreachable
from shell_router.moa.choosing import ModelChooser
from shell_router.moa.executor import Executor
from shell_router.moa.expectations import Activity
from shell_router.topology import Agent, Cluster, Prompt, Topology
from tests.fakes.moa import Recorder, ScriptedMoa, ask
from tests.fakes.scripted_engine import Gates, Script

MODELS = ("small", "large")


@given(st.integers())
def test_the_table_is_the_sum_over_agents_that_have_not_ended(seed: int) -> None:
    rng, activity = random.Random(seed), Activity()
    running: dict[int, tuple[object, object, dict[str, tuple[str, float]]]] = {}
    for step in range(40):
        if rng.random() < 0.4 or not running:
            expected = {
                str(n): (rng.choice(MODELS), float(rng.randint(1, 500)))
                for n in range(rng.randint(1, 5))
            }
            context = activity.enter_program(expected)
            running[step] = (context, context.__enter__(), dict(expected))
        elif rng.random() < 0.7:
            _, leave, left = running[rng.choice(list(running))]
            if left:
                agent = rng.choice(list(left))
                left.pop(agent)
                leave(agent)  # type: ignore[operator]
                leave(agent)  # type: ignore[operator] # it leaves once
        else:
            context, _, _ = running.pop(rng.choice(list(running)))
            context.__exit__(None, None, None)  # type: ignore[attr-defined] # however it ended
        wanted = Counter(dict.fromkeys(MODELS, 0.0))
        for _, _, left in running.values():
            wanted.update(
                {model: sum(t for m, t in left.values() if m == model) for model in MODELS}
            )  # type: ignore[arg-type]
        assert {model: activity.sum_tokens(model) for model in MODELS} == dict(wanted)


LEAF, READER = Prompt(), Prompt(slot=" {output}")
GRAPH = Topology(
    "graph",
    {
        "a": Agent("a", "small", prompt=LEAF, on_failure="drop"),
        "b": Agent("b", "large", prompt=LEAF, on_failure="drop"),
        "root": Agent("root", "large", ("a", "b"), READER),
    },
    (Cluster("leaves", ("a", "b"), EarlyExit("threshold", threshold=0.0, min_completed=1)),),
)


async def ran(scripts: dict[str, Script | str], cut_after: int | None) -> ModelChooser:
    """A request that ends, fails, exits early, or is cancelled after a number of turns of the
    loop."""
    moa = ScriptedMoa(scripts)
    chooser = ModelChooser(moa.models, clock=monotonic)
    executor = Executor(moa.models, moa.cache, moa.embedder, clock=monotonic, chooser=chooser)
    task = asyncio.create_task(executor.run(GRAPH, ask(), lambda _: None))
    if cut_after is not None:
        for _ in range(cut_after):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return chooser


@given(
    st.dictionaries(st.sampled_from(["a", "b", "root"]), st.sampled_from(["text", "fail"])),
    st.none() | st.integers(0, 60),
)
def test_nothing_is_left_in_flight_however_a_request_ends(
    how: dict[str, str], cut_after: int | None
) -> None:
    scripts: dict[str, Script | str] = {
        agent: Script("never", error=EngineUnreachable("gone"))
        if kind == "fail"
        else "some words to say"
        for agent, kind in how.items()
    }
    chooser = asyncio.run(ran(scripts, cut_after))
    assert {model: chooser.activity.sum_tokens(model) for model in MODELS} == dict.fromkeys(
        MODELS, 0
    )


async def test_while_a_request_runs_its_agents_count_until_each_has_ended() -> None:
    gates, events = Gates("root"), Recorder()
    moa = ScriptedMoa(pace=gates.pace)
    chooser = ModelChooser(moa.models, clock=monotonic)
    executor = Executor(moa.models, moa.cache, moa.embedder, clock=monotonic, chooser=chooser)
    running = asyncio.create_task(executor.run(GRAPH, ask(), events.emit))
    await gates.until_waiting(1)
    assert {model: chooser.activity.sum_tokens(model) for model in MODELS} == {
        "small": 0,
        "large": 512,
    }
    gates.open("root")
    await running
    assert chooser.activity.sum_tokens("large") == 0
