import asyncio
from time import monotonic

import pytest

from shell_router.core.events import AgentStarted, Degraded, ModelChosen
from shell_router.errors import PromptTooLong, UnknownModel
from shell_router.moa.choosing import Auto, ModelChooser
from shell_router.moa.executor import Executor
from shell_router.moa.requests import AgentRequest
from shell_router.topology import AUTO, Agent, Prompt, Topology
from tests.fakes.moa import FixedPredictor, Recorder, ScriptedMoa, ask, open_programs
from tests.fakes.scripted_engine import Gates, Hold

PLAIN = Topology(AUTO, {AUTO: Agent(AUTO, AUTO, candidates=("small", "large"))})
READER = Prompt(prefix="{question}", slot=" {output}")
CHAIN = Topology(
    "chain",
    {
        "plan": Agent("plan", AUTO),
        "solve": Agent("solve", AUTO, ("plan",), READER),
        "check": Agent("check", AUTO, ("solve",), READER, candidates=("medium",)),
    },
)
LARGE = FixedPredictor(scores={"small": 0.2, "medium": 0.5, "large": 0.9})


class ChoosingMoa(ScriptedMoa):
    """With a chooser that executor and programs share."""

    def __init__(
        self, predictor: FixedPredictor | None = None, auto: Auto | None = None, **fields: object
    ) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        auto = auto or Auto(("small", "medium", "large"))
        self.chooser = ModelChooser(self.models, auto, predictor, clock=monotonic)
        self.executor = Executor(
            self.models, self.cache, self.embedder, clock=monotonic, chooser=self.chooser
        )
        self.programs = open_programs(
            self.models, self.cache, clock=monotonic, chooser=self.chooser
        )


async def test_the_better_model_answers_and_the_choice_is_reported_before_anything_starts() -> None:
    moa, events = ChoosingMoa(LARGE), Recorder()
    answer = await moa.executor.run(PLAIN, ask(), events.emit)
    assert answer.agents[AUTO].model == "large"
    chosen = events.of(ModelChosen)[0]
    assert (chosen.agents, chosen.model, chosen.why) == ((AUTO,), "large", "better")
    assert chosen.scores == {"small": 0.2, "large": 0.9}
    assert events.events.index(chosen) < events.events.index(events.of(AgentStarted)[0])


async def test_agents_with_the_same_candidates_share_one_choice_and_one_score() -> None:
    predictor = FixedPredictor(scores=LARGE.scores)
    moa, events = ChoosingMoa(predictor), Recorder()
    answer = await moa.executor.run(CHAIN, ask(), events.emit)
    assert {agent: usage.model for agent, usage in answer.agents.items()} == {
        "plan": "large",
        "solve": "large",
        "check": "medium",
    }
    assert [event.agents for event in events.of(ModelChosen)] == [("plan", "solve"), ("check",)]
    assert [(one.stage, one.scored) for one in predictor.asked] == [
        ("1", True),
        ("2", False),
        ("3", False),
    ]


async def test_without_a_predictor_requests_spread_over_the_models_by_what_is_in_flight() -> None:
    gates = Gates(AUTO)
    moa = ChoosingMoa(pace=gates.pace)
    running = [
        asyncio.create_task(moa.executor.run(PLAIN, ask(run_id=str(n)), lambda _: None))
        for n in range(4)
    ]
    await gates.until_waiting(4)
    assert {
        alias: len(engine.running) for alias, engine in moa.engines.items() if engine.running
    } == {
        "small": 2,
        "large": 2,
    }
    gates.open(AUTO)
    await asyncio.gather(*running)


async def test_learned_lengths_are_what_the_load_is_made_of() -> None:
    gates = Gates(AUTO)
    moa = ChoosingMoa(FixedPredictor(own_tokens={"small": 7.0, "large": 9.0}), pace=gates.pace)
    running = asyncio.create_task(moa.executor.run(PLAIN, ask(), lambda _: None))
    await gates.until_waiting(1)
    assert moa.chooser.activity.sum_tokens("small") == 7.0
    gates.open(AUTO)
    await running


async def test_a_predictor_in_trouble_costs_the_scores_and_is_reported() -> None:
    moa, events = ChoosingMoa(FixedPredictor(trouble={"scores": "too slow"})), Recorder()
    await moa.executor.run(PLAIN, ask(), events.emit)
    assert [(event.what, event.error) for event in events.of(Degraded)] == [("scores", "too slow")]
    assert events.of(ModelChosen)[0].why == "no_scores"


async def test_scores_are_asked_for_only_while_another_model_is_within_the_slack() -> None:
    gates, predictor = (
        Gates(AUTO),
        FixedPredictor(scores=LARGE.scores, own_tokens={"small": 7.0, "large": 9.0}),
    )
    moa, events = ChoosingMoa(predictor, Auto(("small", "large")), pace=gates.pace), Recorder()
    running = []
    for run_id in ("first", "second"):
        running.append(
            asyncio.create_task(moa.executor.run(PLAIN, ask(run_id=run_id), events.emit))
        )
        await gates.until_waiting(len(running))
    assert [one.scored for one in predictor.asked] == [True, False], (
        "large is busy, small is idle: nothing is slack"
    )
    assert [(one.model, one.why) for one in events.of(ModelChosen)] == [
        ("large", "better"),
        ("small", "fastest"),
    ]
    gates.open(AUTO)
    await asyncio.gather(*running)


async def test_learned_lengths_reach_the_engines_hints() -> None:
    moa = ChoosingMoa(FixedPredictor(own_tokens={"small": 7.0}, total_tokens={"small": 30.0}))
    await moa.executor.run(Topology("one", {"a": Agent("a", "small")}), ask(), lambda _: None)
    hints = moa.engines["small"].generated[0].hints
    assert (hints.output_tokens, hints.total_tokens) == (7.0, 30.0)


async def test_a_topology_without_choices_asks_for_lengths_and_for_no_scores() -> None:
    predictor = FixedPredictor()
    moa = ChoosingMoa(predictor)
    await moa.executor.run(Topology("one", {"a": Agent("a", "small")}), ask(), lambda _: None)
    assert [(one.workflow, one.models, one.scored) for one in predictor.asked] == [
        ("one", ("small",), False)
    ]


async def test_a_model_whose_context_is_too_short_is_not_considered() -> None:
    moa = ChoosingMoa(FixedPredictor(scores={"small": 0.9, "large": 0.1}), context_length=100)
    moa.models["large"] = type(moa.models["large"])(
        "large", moa.engines["large"], moa.tokenizers["large"], 4096
    )
    answer = await moa.executor.run(PLAIN, ask("word " * 100), lambda _: None)
    assert answer.agents[AUTO].model == "large"


async def test_what_the_client_wants_written_has_to_fit_too() -> None:
    moa = ChoosingMoa(FixedPredictor(scores={"small": 0.9, "large": 0.1}), context_length=140)
    moa.models["large"] = type(moa.models["large"])(
        "large", moa.engines["large"], moa.tokenizers["large"], 4096
    )
    answer = await moa.executor.run(PLAIN, ask(sampling={"max_new_tokens": 500}), lambda _: None)
    assert answer.agents[AUTO].model == "large"


async def test_what_no_model_takes_is_refused_before_any_event() -> None:
    moa, events = ChoosingMoa(LARGE, context_length=100), Recorder()
    with pytest.raises(PromptTooLong):
        await moa.executor.run(PLAIN, ask("word " * 100), events.emit)
    assert events.events == []
    assert moa.chooser.activity.sum_tokens("large") == 0


async def test_a_candidate_that_does_not_exist_is_named() -> None:
    moa = ChoosingMoa()
    with pytest.raises(UnknownModel, match="huge"):
        await moa.executor.run(
            Topology("x", {"a": Agent("a", AUTO, candidates=("huge",))}), ask(), lambda _: None
        )


def send(agent: str, program: str = "p", **fields: object) -> AgentRequest:
    return AgentRequest("tenant", program, agent, AUTO, (f"This is {agent}.",), **fields)  # type: ignore[arg-type]


async def test_an_agent_program_keeps_its_model_and_another_takes_its_own() -> None:
    hold = Hold(0)
    moa, events = ChoosingMoa(auto=Auto(("small", "large")), pace=hold.pace), Recorder()
    sent = (("p", "first"), ("p", "second"), ("q", "first"))
    running = [
        asyncio.create_task(moa.programs.run(send(agent, program), events.emit))
        for program, agent in sent
    ]
    await hold.until_waiting()
    hold.release()
    await asyncio.gather(*running)
    assert [(event.model, event.why) for event in events.of(ModelChosen)] == [
        ("small", "no_scores"),
        ("small", "kept"),
        ("large", "fastest"),
    ]


async def test_other_candidates_in_the_same_program_are_another_choice() -> None:
    moa, events = ChoosingMoa(LARGE), Recorder()
    await moa.programs.run(send("first"), events.emit)
    await moa.programs.run(send("second", candidates=("small", "medium")), events.emit)
    assert [event.model for event in events.of(ModelChosen)] == ["large", "medium"]


async def test_agents_of_one_program_that_come_together_get_one_model() -> None:
    moa, events = ChoosingMoa(auto=Auto(("small", "large"))), Recorder()
    await asyncio.gather(*(moa.programs.run(send(f"agent-{n}"), events.emit) for n in range(4)))
    assert {event.model for event in events.of(ModelChosen)} == {"small"}


async def test_an_agent_counts_as_load_until_it_ends_whichever_of_its_calls_leave() -> None:
    hold = Hold(0)
    moa = ChoosingMoa()
    for engine in moa.engines.values():
        engine.pace = hold.pace
    first, again = (asyncio.create_task(moa.programs.run(send("a"), print)) for _ in range(2))
    await hold.until_waiting()
    first.cancel()
    await asyncio.wait([first])
    assert moa.chooser.activity.sum_tokens("small") > 0
    hold.release()
    await again
    assert moa.chooser.activity.sum_tokens("small") == 0
