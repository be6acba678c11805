"""Requests on their way through steps."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shell_router.core.events import Degraded, ModelChosen, StepChosen
from shell_router.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    EngineStalled,
    EngineUnreachable,
    InvalidField,
    PromptRefused,
    PromptTooLong,
)
from shell_router.moa.calls import ToolOffer
from shell_router.moa.executor import Executor
from shell_router.topology import Agent, Conditional, Prompt, Topology, parse_topology
from tests.fakes.moa import FixedPredictor, Recorder, ScriptedMoa, agent_of, ask
from tests.fakes.scripted_engine import Gates, Script
from tests.fakes.topologies import parse_steps

TREE = parse_topology(
    "name: tree\ntree: {shape: [2, 1], models: [small, large]}", source="tree.yaml"
)

FIRST = """name: first
start: quick
steps:
  quick: {model: small, then: [{when: {matches: unsure}, go: careful}, {go: end}]}
  careful: {model: large}
"""


def steps(text: str = FIRST) -> Conditional:
    return parse_steps(text, source="f.yaml", topologies={"tree": TREE})


def chosen(events: Recorder) -> list[tuple[str, int, str]]:
    return [(event.after, event.rule, event.step) for event in events.of(StepChosen)]


async def test_the_output_ends_the_request_where_its_rules_say_so() -> None:
    moa, events = ScriptedMoa({"quick": "it is 2"}), Recorder()
    answer = await moa.executor.run(steps(), ask(), events.emit)
    assert (answer.text, list(answer.agents)) == ("it is 2", ["quick"])
    assert chosen(events) == [("start", 1, "quick"), ("quick", 2, "end")]
    assert not moa.engines["large"].generated


async def test_the_output_leads_to_another_step_whose_output_is_the_answer() -> None:
    moa, events = ScriptedMoa({"quick": "i am unsure", "careful": "it is 2"}), Recorder()
    answer = await moa.executor.run(steps(), ask("How much?"), events.emit)
    assert (answer.text, list(answer.agents)) == ("it is 2", ["quick", "careful"])
    assert sum(spent.completion_tokens for spent in answer.agents.values()) == 7
    assert chosen(events) == [("start", 1, "quick"), ("quick", 1, "careful"), ("careful", 1, "end")]
    assert [event.why for event in events.of(StepChosen)] == [
        "always",
        "output matches 'unsure'",
        "always",
    ]
    assert moa.prompt_of("careful") == "<user>How much?<assistant>"


async def test_what_was_held_back_is_sent_when_it_is_known_to_be_the_answer() -> None:
    held, passed = Recorder(), Recorder()
    await ScriptedMoa({"quick": "it is 2"}).executor.run(steps(), ask(), held.emit)
    await ScriptedMoa({"quick": "unsure", "careful": "2"}).executor.run(steps(), ask(), passed.emit)
    assert [event.text for event in held.of(StepChosen)] == ["", "it is 2"]
    assert [event.text for event in passed.of(StepChosen)] == ["", "", ""]
    assert [event.root for event in passed.of(StepChosen)] == ["quick", "careful", "careful"]


async def test_a_label_or_the_question_chooses_a_whole_tree() -> None:
    text = """start:
  - {when: {label: {effort: high}}, go: together}
  - {when: {matches: '^Why'}, go: together}
  - {go: alone}
steps: {together: {topology: tree}, alone: {model: small}}
"""
    for request in (ask("How?", labels={"effort": "high"}), ask("Why?")):
        moa = ScriptedMoa({"together/root": "all of us"})
        answer = await moa.executor.run(steps(text), request, print)
        assert answer.text == "all of us"
        assert list(answer.agents) == [
            "together/proposer-1",
            "together/proposer-2",
            "together/root",
        ]
        assert "together/proposer-1 thinks" in moa.prompt_of("together/root")
    assert list((await ScriptedMoa().executor.run(steps(text), ask("How?"), print)).agents) == [
        "alone"
    ]


async def test_a_tree_is_asked_the_same_in_a_step_as_on_its_own() -> None:
    scripts = {"root": "x", "proposer-1": "one", "proposer-2": "two"}
    alone = ScriptedMoa(scripts)
    inside = ScriptedMoa({f"whole/{agent}": said for agent, said in scripts.items()})
    tree = parse_topology(
        "name: tree\ntree:\n  shape: [2, 1]\n  models: [small]\n"
        "  aggregator: {prompt: {slot: '[{agent} {index} {output}]'}}\n",
        source="t.yaml",
    )
    whole = parse_steps(
        "start: whole\nsteps: {whole: {topology: tree}}", source="f.yaml", topologies={"tree": tree}
    )
    await alone.executor.run(tree, ask("Why?"), print)
    await inside.executor.run(whole, ask("Why?"), print)
    assert inside.prompt_of("whole/root") == alone.prompt_of("root")
    assert "[proposer-1 1 one]" in alone.prompt_of("root")


async def test_a_step_reads_the_outputs_of_those_before_it_that_ran() -> None:
    text = """start: [{when: {matches: short}, go: b}, {go: a}]
steps:
  a: {model: small, then: b}
  b: {model: medium, then: c}
  c:
    model: large
    precursors: [a, b]
    prompt: {prefix: 'Q {question}', slot: ' [{index} {agent}: {output}]', suffix: ' So'}
"""
    moa = ScriptedMoa({"a": "first {question}", "b": "second"})
    await moa.executor.run(steps(text), ask("why?"), print)
    assert moa.prompt_of("c") == "<user>Q why? [1 a: first {question}] [2 b: second] So<assistant>"
    await moa.executor.run(steps(text), ask("short?", run_id="other"), print)
    assert moa.prompt_of("b") and any(
        "Q short? [1 b: second] So" in prompt for prompt in prompts(moa, "large")
    )


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "{}"),
        ("prompt: {prefix: 'Q {question}', slot: ' [{output}]'}", "Q {}"),
        ("prompt: {slot: ' [{output}]', suffix: ' So'}", "{} So"),
    ],
)
@pytest.mark.parametrize("question", ["short?", "why?"])
async def test_a_step_that_reads_nothing_is_asked_as_an_agent_without_precursors(
    question: str, prompt: str, said: str
) -> None:
    moa = ScriptedMoa({"a": " \n"})
    text = f"""start: [{{when: {{matches: short}}, go: b}}, {{go: a}}]
steps:
  a: {{model: small, then: b}}
  b: {{model: large, precursors: [a], {prompt}}}
"""
    await moa.executor.run(steps(text), ask(question), print)
    assert moa.prompt_of("b") == f"<user>{said.format(question)}<assistant>"


def prompts(moa: ScriptedMoa, model: str) -> list[str]:
    return [
        moa.tokenizers[model].decode(request.input_ids) for request in moa.engines[model].generated
    ]


CONFIDENCE = (
    "start: a\nsteps: {a: {model: small, then: [{when: {confidence_below: 0.5}, go: "
    "b}]}, b: {model: large}}"
)


@pytest.mark.parametrize(("logprob", "ran"), [(-0.1, ["a"]), (-1.0, ["a", "b"])])
async def test_how_sure_the_output_is_decides(logprob: float, ran: list[str]) -> None:
    moa = ScriptedMoa({"a": Script("so it is", logprob=logprob)})
    answer = await moa.executor.run(steps(CONFIDENCE), ask(), print)
    assert list(answer.agents) == ran


async def test_log_probabilities_are_asked_for_only_where_a_rule_reads_them() -> None:
    moa = ScriptedMoa({"a": Script("so", logprob=-1.0)})
    await moa.executor.run(steps(CONFIDENCE), ask(), print)
    assert [request.logprobs for request in moa.engines["small"].generated] == [True]
    assert [request.logprobs for request in moa.engines["large"].generated] == [False]


async def test_the_clients_sampling_is_for_steps_that_may_answer_and_its_seed_for_all() -> None:
    moa = ScriptedMoa()
    text = """start: a
steps:
  a: {model: small, then: b}
  b: {model: medium, then: [{when: {matches: x}, go: c}]}
  c: {model: large}
"""
    request = ask(sampling={"sampling_seed": 3, "max_new_tokens": 7})
    await moa.executor.run(steps(text), request, print)
    (first,), (second,) = moa.engines["small"].generated, moa.engines["medium"].generated
    left = 4096 - len(first.input_ids)
    assert first.sampling == {"sampling_seed": 3, "stream_interval": 32, "max_new_tokens": left}
    assert second.sampling == {"sampling_seed": 3, "max_new_tokens": 7, "stream_interval": 32}


async def test_what_is_held_back_comes_in_large_pieces_and_the_last_step_as_its_client_asks() -> (
    None
):
    moa = ScriptedMoa({"quick": "unsure"})
    text = FIRST.replace(
        "quick: {model: small,", "quick: {model: small, sampling: {stream_interval: 2},"
    )
    await moa.executor.run(steps(), ask(), print)
    await moa.executor.run(steps(text), ask(run_id="other"), print)
    asked = [request.sampling.get("stream_interval") for request in moa.engines["small"].generated]
    assert asked == [32, 2]
    assert all(
        "stream_interval" not in request.sampling for request in moa.engines["large"].generated
    )


async def test_each_step_has_request_ids_of_which_none_begins_another() -> None:
    moa = ScriptedMoa({"quick": "unsure"})
    await moa.executor.run(steps(), ask(run_id="run"), print)
    rids = [request.rid for alias in ("small", "large") for request in moa.engines[alias].generated]
    assert rids == ["run.0.0.quick", "run.1.0.careful"]


async def test_auto_chooses_a_model_for_a_step() -> None:
    moa, events = ScriptedMoa({"quick": "unsure"}), Recorder()
    text = FIRST.replace("model: large", "model: [medium, large]")
    answer = await moa.executor.run(steps(text), ask(), events.emit)
    (choice,) = events.of(ModelChosen)
    assert choice.agents == ("careful",) and answer.agents["careful"].model == choice.model


# --- classifiers

CLASSES = """start:
  - {when: {classifier: subject, is: sums}, go: a}
  - {when: {classifier: subject, is: tales}, go: b}
  - {go: c}
steps: {a: {model: small}, b: {model: medium}, c: {model: large}}
classifiers:
  subject:
    min_similarity: 0.2
    examples: {sums: [how much is one and two], tales: [tell me a tale, sing of the sea]}
"""


@pytest.mark.parametrize(
    ("question", "step"),
    [("how much is three and two", "a"), ("now sing of ships", "b"), ("xyz", "c")],
)
async def test_the_example_most_like_the_question_decides(question: str, step: str) -> None:
    answer = await ScriptedMoa().executor.run(steps(CLASSES), ask(question), print)
    assert list(answer.agents) == [step]


async def test_each_steps_output_has_a_class_of_its_own() -> None:
    text = """start: a
steps:
  a: {model: small, then: [{when: {classifier: mood, is: glad}, go: b}]}
  b: {model: medium, then: [{when: {classifier: mood, is: glad}, go: c}]}
  c: {model: large}
classifiers: {mood: {examples: {glad: [so glad of it], sad: [so sad of it]}}}
"""
    moa = ScriptedMoa({"a": "glad", "b": "sad"})
    assert list((await moa.executor.run(steps(text), ask(), print)).agents) == ["a", "b"]


async def test_agents_that_are_given_other_outputs_are_asked_other_things() -> None:
    same = Prompt(slot=" <{agent}: {output}>")
    given = {
        name: Agent(name, "small", prompt=same, given=((name, f"said {name}"),))
        for name in ("a", "b")
    }
    moa = ScriptedMoa()
    graph = Topology("t", {**given, "root": Agent("root", "large", ("a", "b"))})
    await moa.executor.run(graph, ask("q"), print)
    assert moa.prompt_of("a") == "<user>q <a: said a><assistant>"
    assert moa.prompt_of("b") == "<user>q <b: said b><assistant>"


class CountingEmbedder:
    """Passes on to another and remembers what it was asked; fails while `error` is set."""

    def __init__(self, moa: ScriptedMoa, error: EngineError | None = None) -> None:
        self._embedder = moa.embedder
        self.error = error
        self.asked: list[str] = []

    async def embed(self, text: str):  # type: ignore[no-untyped-def] # as Embedder's
        self.asked.append(text)
        if self.error:
            raise self.error
        return await self._embedder.embed(text)


def with_embedder(moa: ScriptedMoa, embedder: CountingEmbedder | None) -> Executor:
    return Executor(moa.models, moa.cache, embedder, clock=lambda: 0.0)


async def test_examples_are_embedded_once_and_a_text_once_per_request() -> None:
    moa = ScriptedMoa()
    embedder = CountingEmbedder(moa)
    executor = with_embedder(moa, embedder)
    runs = (
        executor.run(steps(CLASSES), ask("xyz", run_id=f"run{number}"), print)
        for number in range(3)
    )
    await asyncio.gather(*runs)
    assert sorted(embedder.asked) == [
        "how much is one and two",
        "sing of the sea",
        "tell me a tale",
        *["xyz"] * 3,
    ]


async def test_a_long_text_is_classified_by_its_beginning() -> None:
    moa = ScriptedMoa(context_length=100_000)
    embedder = CountingEmbedder(moa)
    question = "how much is one " * 4000
    await with_embedder(moa, embedder).run(steps(CLASSES), ask(question), print)
    assert question[:2048] in embedder.asked and question not in embedder.asked


async def test_an_embedder_that_fails_lets_its_rules_not_hold_and_is_reported() -> None:
    moa, events = ScriptedMoa(), Recorder()
    executor = with_embedder(moa, CountingEmbedder(moa, EngineUnreachable("the embedder is gone")))
    answer = await executor.run(steps(CLASSES), ask("how much is one and two"), events.emit)
    assert list(answer.agents) == ["c"]
    assert [(event.what, event.error) for event in events.of(Degraded)] == [
        ("classifier", "the embedder is gone")
    ]


async def test_a_classifier_without_an_embedder_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="asks the classifier 'subject'"):
        await with_embedder(ScriptedMoa(), None).run(steps(CLASSES), ask(), print)


# --- predicted scores

SCORED = """start: [{when: {score_below: {small: 0.5}}, go: b}, {go: a}]
steps: {a: {model: small, then: [{when: {score_below: {small: 0.9, medium: 0.6}}, go: b}]}, b: {model: large}}
"""


@pytest.mark.parametrize(
    ("small", "medium", "ran"),
    [(0.4, 0.9, ["b"]), (0.6, 0.5, ["a", "b"]), (0.6, 0.7, ["a"]), (0.95, 0.1, ["a"])],
)
async def test_predicted_chances_of_being_right_decide(
    small: float, medium: float, ran: list[str]
) -> None:
    predictor = FixedPredictor({"small": small, "medium": medium})
    moa, events = ScriptedMoa(predictor=predictor), Recorder()
    answer = await moa.executor.run(steps(SCORED), ask("Why not?"), events.emit)
    assert list(answer.agents) == ran
    assert [(one.user, one.models) for one in predictor.asked if one.scored] == [
        ("Why not?", ("small", "medium"))
    ]
    assert not events.of(Degraded)


async def test_a_predictor_that_fails_lets_its_rules_not_hold_and_is_reported() -> None:
    predictor = FixedPredictor(trouble={"scores": "too slow"})
    moa, events = ScriptedMoa(predictor=predictor), Recorder()
    answer = await moa.executor.run(steps(SCORED), ask(), events.emit)
    assert list(answer.agents) == ["a"]
    assert {(event.what, event.error) for event in events.of(Degraded)} == {("scores", "too slow")}
    assert sum(one.scored for one in predictor.asked) == 1


async def test_a_model_that_the_predictor_does_not_know_is_reported() -> None:
    moa, events = ScriptedMoa(predictor=FixedPredictor({"small": 0.1})), Recorder()
    answer = await moa.executor.run(
        steps(SCORED.replace("small: 0.5", "other: 0.5")), ask(), events.emit
    )
    assert list(answer.agents) == ["a"]
    assert events.of(Degraded)[0].error == "the router does not know other, medium"


async def test_scores_without_a_predictor_are_refused_by_their_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"asks how probably small or medium would be right.*prediction\.scores"
    ):
        await ScriptedMoa().executor.run(steps(SCORED), ask(), print)


# --- failures, limits, and being left


async def test_what_is_refused_before_the_first_step_has_begun_is_refused_before_any_event() -> (
    None
):
    events = Recorder()
    with pytest.raises(PromptTooLong):
        await ScriptedMoa(context_length=60).executor.run(steps(), ask("a " * 100), events.emit)
    assert not events.events


REFINE = Path("topologies/self-refine.yaml").read_text("utf-8")


@pytest.mark.parametrize(
    ("critics", "ran", "answering"),
    [
        (["all right: PASS"], ["draft", "critic"], "draft"),
        (
            ["a PASSAGE is wrong", "PASS"],
            ["draft", "critic", "revision", "second-critic"],
            "revision",
        ),
        (
            ["wrong", "wrong"],
            ["draft", "critic", "revision", "second-critic", "second-revision"],
            "second-revision",
        ),
    ],
)
async def test_a_critic_that_passes_ends_the_request_with_the_output_that_it_read(
    critics: list[str], ran: list[str], answering: str
) -> None:
    scripts = dict(zip(("critic", "second-critic"), critics, strict=False))
    moa = ScriptedMoa({step: f"it is {step}" for step in ran} | scripts)
    events = Recorder()
    request = ask(sampling={"max_new_tokens": 7})
    answer = await moa.executor.run(steps(REFINE), request, events.emit)
    assert (answer.text, list(answer.agents)) == (f"it is {answering}", ran)
    assert events.of(StepChosen)[-1].root == answering
    held = answering != "second-revision"  # it streams: nothing can follow it
    assert [event.text for event in events.of(StepChosen) if event.text] == [answer.text] * held
    limits = {
        step: request.sampling["max_new_tokens"]
        for model in moa.engines.values()
        for request in model.generated
        if (step := agent_of(request)) in ran
    }
    assert limits == {step: 256 if "critic" in step else 7 for step in ran}


async def test_an_answer_that_another_step_may_replace_calls_no_tools() -> None:
    offer = ToolOffer(({"type": "function", "function": {"name": "f", "parameters": {}}},))
    with pytest.raises(InvalidField, match="another step can follow"):
        await ScriptedMoa().executor.run(steps(REFINE), replace(ask(), offer=offer), print)


@pytest.mark.parametrize(
    "error", [EngineUnreachable("gone"), EngineStalled("silent"), PromptRefused("no such role")]
)
async def test_another_way_is_taken_from_a_step_that_fails(error: Any) -> None:
    text = """start: router
steps:
  router: {model: small, then: [{when: {matches: sums}, go: sums}, {go: other}], on_failure: other}
  sums: {model: medium}
  other: {model: large, precursors: [router], then: check}
  check: {model: medium, answer: other, on_failure: end}
"""
    moa, events = (
        ScriptedMoa(
            {
                "router": Script("x y", piece_words=1, error=error, error_after=1),
                "other": "it is 2",
                "check": Script("x", error=error),
            }
        ),
        Recorder(),
    )
    answer = await moa.executor.run(steps(text), ask("How much?"), events.emit)
    assert answer.text == "it is 2"
    spent = {name: (used.state, used.completion_tokens) for name, used in answer.agents.items()}
    assert spent == {"router": ("failed", 1), "other": ("finished", 4), "check": ("failed", 0)}
    assert answer.agents["router"].prompt_tokens and answer.agents["router"].error == str(error)
    assert chosen(events)[1:] == [
        ("router", 3, "other"),
        ("other", 1, "check"),
        ("check", 2, "end"),
    ]
    assert events.of(StepChosen)[1].why == f"it failed: {error}"
    assert moa.prompt_of("other") == "<user>How much?<assistant>"
    rids = [request.rid for engine in moa.engines.values() for request in engine.generated]
    assert len({rid.rpartition(".")[0] for rid in rids}) == 3  # an abort is for all that begin so


async def test_agents_of_a_topology_that_fails_as_a_step_count_too() -> None:
    text = "start: two\nsteps: {two: {topology: two, on_failure: b}, b: {model: large}}"
    agents = "{p: {model: small}, q: {model: medium}, root: {model: large, precursors: [p, q]}}"
    two = parse_topology(f"name: two\nagents: {agents}", source="two.yaml")
    left = Script("x y", piece_words=1, error=EngineUnreachable("gone"), error_after=1)
    moa = ScriptedMoa({"two/p": "1 2 3", "two/q": left, "b": "it is 2"})
    graph = parse_steps(text, source="s.yaml", topologies={"two": two})
    answer = await moa.executor.run(graph, ask(), print)
    assert {name: used.state for name, used in answer.agents.items()} == {
        "two/p": "finished",
        "two/q": "failed",
        "two/root": "unneeded",
        "b": "finished",
    }


async def test_the_fallback_of_a_step_takes_the_place_of_its_model() -> None:
    text = "start: a\nsteps: {a: {model: small, fallbacks: [large]}}"
    moa = ScriptedMoa({"a": "it is 2"})
    moa.engines["small"].answer = lambda _: Script("x", error=EngineUnreachable("gone"))
    answer = await moa.executor.run(steps(text), ask(), print)
    assert (answer.text, answer.agents["a"].model) == ("it is 2", "large")


async def test_a_step_that_fails_fails_the_request() -> None:
    moa, events = (
        ScriptedMoa({"quick": "unsure", "careful": Script("x", error=EngineUnreachable("gone"))}),
        Recorder(),
    )
    with pytest.raises(EngineUnreachable, match="gone"):
        await moa.executor.run(steps(), ask(), events.emit)
    assert not moa.running


async def test_all_steps_together_have_the_requests_time() -> None:
    gates = Gates("careful")
    moa = ScriptedMoa({"quick": "unsure"}, pace=gates.pace)
    with pytest.raises(DeadlineExceeded, match=r"'first' gave no answer within 0\.5 s"):
        await moa.executor.run(steps(), ask(timeout_s=0.5), print)
    assert not moa.running and moa.aborted == {"careful"}


@pytest.mark.parametrize("at", ["quick", "careful"])
async def test_a_request_that_is_left_leaves_nothing_running(at: str) -> None:
    gates = Gates(at)
    moa, events = ScriptedMoa({"quick": "unsure"}, pace=gates.pace), Recorder()
    run = asyncio.create_task(moa.executor.run(steps(), ask(), events.emit))
    await events.until(lambda seen: any(event.step == at for event in seen.of(StepChosen)))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not moa.running
    assert len(moa.cache) == 0


@pytest.mark.parametrize(
    ("when", "off_loop"), [("matches: needle$", True), ("label: {kind: easy}", False)]
)
async def test_patterns_are_compiled_and_looked_for_off_the_event_loop(
    when: str, off_loop: bool
) -> None:
    text = (
        f"start: [{{when: {{{when}}}, go: a}}, {{go: b}}]\nsteps: {{a: {{model: small}}, b: "
        f"{{model: large}}}}"
    )
    moa, events = ScriptedMoa(context_length=100_000), Recorder()
    asked = replace(ask("hay needle"), labels={"kind": "easy"})
    running = asyncio.create_task(moa.executor.run(steps(text), asked, events.emit))
    await asyncio.sleep(0)  # on the event loop the choice would be made in its first turn
    assert bool(events.events) is not off_loop
    await running
    assert chosen(events)[0][2] == "a"
