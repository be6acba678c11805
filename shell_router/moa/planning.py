"""Plans a request before its first agent runs: models, sampling and prompts, or a refusal."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Any, Literal

from agent_cache import End, LogKey, LogRead
from shell_router.core.engine import NO_OPTIONS, Hints, ServedModel, value
from shell_router.core.events import Event
from shell_router.core.predictors import Forecast
from shell_router.core.sampling import GRAMMARS, OUTPUT_FORMS
from shell_router.early_exit.settings import ExitPolicy
from shell_router.errors import (
    AgentFailed,
    InvalidField,
    InvalidRequest,
    PromptRefused,
    ShellRouterError,
)
from shell_router.moa.agent import AgentTask, Source, check_task
from shell_router.moa.agent_calls import select_messages
from shell_router.moa.calls import ToolOffer, ask_for_calls
from shell_router.moa.choosing import ModelChooser
from shell_router.moa.comparison import RunComparison
from shell_router.moa.expectations import (
    LatencyEstimates,
    expect_outputs,
    guess_output_tokens,
)
from shell_router.moa.prompt import (
    CHARACTERS_PER_TOKEN,
    LONG_TEXT,
    AgentPrompt,
    Slot,
    render_agent_prompt,
)
from shell_router.moa.requests import NOTHING_KEPT, MoaRequest
from shell_router.routing.holdout import Holdouts
from shell_router.routing.increments import fewest_tokens, order_slots, tokens_per_event
from shell_router.topology import AUTO, Agent, Prefill, Topology

NO_UPDATES = Prefill(incremental=False)

DRAFTED_FROM = 1000
"""A plain request asks for drafts if its messages have this many characters: shorter ones hold
little to repeat.
"""

Sampling = Mapping[str, Any]


@value
class Resources:
    """The models, the chooser and the comparisons that one run uses."""

    models: Mapping[str, ServedModel]
    chooser: ModelChooser
    holdouts: Holdouts


@value
class Outline:
    """The decisions from which the tasks of a run are built.

    Attributes:
        topology: The graph, with one model for every agent.
        models: All configured models, by alias.
        sampling: Each agent's sampling parameters.
        hints: Each agent's hints, with its expected output tokens.
        growing: The agents whose prompts are prefilled while they grow, each with the fewest tokens
            of an update.
        dropped_drafts: The agents that go without drafts, for comparison.
    """

    topology: Topology
    request: MoaRequest
    models: Mapping[str, ServedModel]
    estimates: LatencyEstimates
    sampling: Mapping[str, Sampling]
    hints: Mapping[str, Hints]
    growing: Mapping[str, float] = field(default_factory=dict)
    dropped_drafts: Collection[str] = ()


@value
class Plan:
    """A request's graph with models chosen, and the task of every agent that asks a model.

    Attributes:
        choices: Events of chosen models. They are emitted once nothing can be refused any more,
            because a stream's head goes out with the first event.
        expected: Each agent's model and expected output tokens.
        comparison: None if no optimization could pay.
        refusals: Why agents without a task have none: their models cannot take their prompts.
    """

    outline: Outline
    choices: Sequence[Event]
    expected: Mapping[str, tuple[str, float]]
    comparison: RunComparison | None
    tasks: Mapping[str, AgentTask]
    refusals: Mapping[str, PromptRefused]


async def plan_run(resources: Resources, topology: Topology, request: MoaRequest) -> Plan:
    """Choose models, set expectations, and build the task of every agent.

    Models are chosen by their load, among those that can take the prompt. Unless a prompt is so
    long that it has to be tokenized, no other task runs between the choice and the return, so no
    other request sees the same load.

    Raises:
        UnknownModel: A model is not configured.
        InvalidRequest: A parameter cannot be served.
        PromptRefused: Models cannot take their prompts, and there is no answer without them.
    """
    plan = await _plan_once(resources, topology, request)
    while agents := _drop_candidates(resources.chooser, topology, plan):
        topology = replace(topology, agents={**topology.agents, **agents})
        plan = await _plan_once(resources, topology, request)
    if plan.refusals:
        await _check_refusals(plan)
    return plan


async def _plan_once(resources: Resources, topology: Topology, request: MoaRequest) -> Plan:
    """Return a plan in which models may refuse their prompts."""
    models = resources.models
    characters = sum([len(message["content"]) for message in request.messages])
    if characters > LONG_TEXT:
        resources.chooser.require_possible(characters)
    choices: list[Event] = []
    outline = await _outline_run(resources, topology, request, characters, choices)
    topology = outline.topology
    growing = find_growing_prompts(outline, characters)
    drafting = [agent for agent in topology.agents.values() if may_draft(agent, models) == "auto"]
    comparison = None
    if growing or drafting:
        comparison = RunComparison(
            resources.holdouts,
            topology,
            request,
            grows=bool(growing),
            drafting=drafting,
            now_s=resources.chooser.clock(),
        )
        if comparison.drops_updates:
            growing = {}
        outline = replace(outline, growing=growing, dropped_drafts=comparison.dropped_drafts)
    tasks, refusals = await build_tasks(outline)
    return Plan(outline, choices, expect_load(outline), comparison, tasks, refusals)


def _drop_candidates(chooser: ModelChooser, topology: Topology, plan: Plan) -> Mapping[str, Agent]:
    """Return the agents whose chosen models refused, with the other models that may be chosen."""
    agents = {}
    for name in plan.refusals:
        agent = topology.agents[name]
        if agent.model == AUTO:
            refusing = plan.outline.topology.agents[name].model
            others = chooser.list_candidates(agent.candidates, without=refusing)
            if others:
                agents[name] = replace(agent, candidates=others)
    return agents


async def _check_refusals(plan: Plan) -> None:
    """Raise the first refusal that leaves the run without an answer.

    Agents that may be dropped are left out, and so are the readers that have no precursor then.
    """
    lost: dict[str, ShellRouterError] = {}
    for agent in plan.outline.topology.agents.values():
        error: ShellRouterError | None = plan.refusals.get(agent.id)
        if error is not None and await _has_fallback(plan.outline, agent):
            error = None
        missing = [lost[precursor] for precursor in agent.precursors if precursor in lost]
        if error is None and missing and len(missing) == len(agent.precursors):
            error = AgentFailed(f"Agent {agent.id!r} has no precursor left: {missing[0]}")
            error.__cause__ = missing[0]
        if error is None:
            continue
        if agent.on_failure == "fail" or agent.id == plan.outline.topology.root.id:
            raise error
        lost[agent.id] = error


async def _has_fallback(outline: Outline, agent: Agent) -> bool:
    """Return whether a fallback of the agent can take its prompt."""
    for attempt in range(len(agent.fallbacks)):
        with suppress(PromptRefused):
            await plan_fallback(outline, agent.id, attempt)
            return True
    return False


async def _outline_run(
    resources: Resources,
    topology: Topology,
    request: MoaRequest,
    characters: int,
    choices: list[Event],
) -> Outline:
    """Choose models and set expectations; `choices` gets the events of chosen models."""
    models = resources.models
    chooser = resources.chooser
    agents = topology.agents.values()
    sampling = {agent.id: merge_sampling(topology, agent, request) for agent in agents}
    if not topology.models <= {AUTO, *models}:
        chooser.require_models(f"Topology {topology.name!r}", topology.models - {AUTO})
    forecasts: Mapping[str, Forecast] = {}
    if chooser.predicts or AUTO in topology.models:
        topology, forecasts = await chooser.choose_for_topology(topology, request, choices.append)
    if characters >= DRAFTED_FROM and (topology.name == AUTO or topology.name in models):
        topology = replace(topology, agents={topology.name: replace(topology.root, drafts=True)})
    estimates = chooser.estimates
    hints = expect_outputs(topology, estimates, request, forecasts)
    return Outline(topology, request, models, estimates, sampling, hints)


async def plan_fallback(outline: Outline, agent: str, attempt: int) -> AgentTask:
    """Return the agent's task with its fallback number `attempt`, from 0.

    Raises:
        PromptRefused: The fallback cannot take the prompt.
    """
    model = outline.topology.agents[agent].fallbacks[attempt]
    topology = outline.topology.with_models({agent: model})
    request = outline.request
    if not outline.models[model].limits_thinking:  # the limit was for the failed model
        unlimited = replace(topology.agents[agent], max_thinking_tokens=None)
        topology = replace(topology, agents={**topology.agents, agent: unlimited})
        request = replace(request, max_thinking_tokens=None)
    outline = replace(outline, topology=topology, request=request, growing={}, dropped_drafts=())
    fallback = topology.agents[agent]
    fallback = replace(fallback, fallbacks=fallback.fallbacks[attempt + 1 :])
    order = order_slots(fallback.precursors, topology.prefill.slot_order, expect_finish(outline))
    # engines abort every request whose id begins with that of the attempt before
    number = len(topology.agents) + attempt
    task = build_task(outline, fallback, number, render_prompt(outline, fallback, order))
    await check_task(task)
    return task


def merge_sampling(topology: Topology, agent: Agent, request: MoaRequest) -> Sampling:
    """Return the agent's sampling parameters for this request.

    The client's sampling holds for the root. Every other agent without a seed of its own gets one
    of 31 bits, derived from the client's. If the root votes, agents whose outputs may be the
    answer keep their own sampling, within the length and in the form that the client asks for.
    """
    if agent.id == topology.root.id:
        own = agent.sampling
        if not request.sampling.keys().isdisjoint(GRAMMARS):
            own = {name: value for name, value in own.items() if name not in GRAMMARS}
        return {**own, **request.sampling}
    merged: dict[str, Any] = {}
    seed = request.sampling.get("sampling_seed")
    if seed is not None:
        merged["sampling_seed"] = zlib.crc32(f"{seed}/{agent.id}".encode()) >> 1
    merged |= agent.sampling
    if topology.voters.get(agent.id):
        for name in ("max_new_tokens", *OUTPUT_FORMS):
            if name in request.sampling:
                merged[name] = request.sampling[name]
    return merged


def find_offer(topology: Topology, agent: Agent, request: MoaRequest) -> ToolOffer | None:
    """Return the tools that the agent may call. Only the root must call if the client says so."""
    offer = request.offer
    if offer is None or not topology.may_call(agent):
        return None
    return offer if agent.id == topology.root.id else replace(offer, must_call=False)


def expect_load(outline: Outline) -> Mapping[str, tuple[str, float]]:
    """Return each agent's model and expected output tokens."""
    expected = {}
    for agent in outline.topology.agents.values():
        tokens = outline.hints[agent.id].output_tokens
        if tokens is None:
            tokens = guess_output_tokens(outline.sampling[agent.id])
        expected[agent.id] = agent.model, tokens
    return expected


# --- incremental prefill


def find_growing_prompts(outline: Outline, characters: int) -> Mapping[str, float]:
    """Return the agents whose prompts may be prefilled while they grow.

    If no update can pay for an agent, it is left out: its prompt is sent once, and its precursors
    write in pieces of the usual size.

    Args:
        outline: The decisions so far.
        characters: The length of the client's messages.

    Returns:
        The fewest tokens of an update, by agent.
    """
    chunk = outline.topology.prefill.chunk_tokens
    growing: dict[str, float] = {}
    if not outline.topology.prefill.incremental or outline.request.tier == "batch":
        return growing  # a batch has the time, and updates would take online work's
    for agent in outline.topology.agents.values():
        if not agent.precursors or agent.votes or outline.models[agent.model].takes_messages:
            continue
        if chunk != "adaptive":
            growing[agent.id] = float(chunk)
            continue
        fewest = fewest_tokens(outline.estimates.get_load(outline.models[agent.model]).cost)
        if expect_prompt_tokens(outline, agent, characters) > fewest:
            growing[agent.id] = fewest
    return growing


def expect_prompt_tokens(outline: Outline, agent: Agent, characters: int) -> float:
    """Estimate the length of the agent's complete prompt."""
    characters += len(agent.prompt.prefix) + len(agent.prompt.suffix)
    characters += sum(len(output) for _, output in agent.given)
    tokens = characters / CHARACTERS_PER_TOKEN
    for precursor in agent.precursors:
        expected = outline.hints[precursor].output_tokens
        if expected is None:
            expected = guess_output_tokens(outline.sampling[precursor])
        tokens += expected
    return tokens


def choose_stream_interval(outline: Outline, agent: Agent) -> int:
    """Return how many tokens the agent streams at a time, for its readers and cluster's gate."""
    topology = outline.topology
    readers = topology.successors[agent.id]
    intervals = [outline.growing[reader] for reader in readers if reader in outline.growing]
    needs = find_exit_needs(topology, agent)
    is_judged = needs is not None and needs.reads_streams
    return tokens_per_event(min(intervals, default=None), judged=is_judged)


def find_exit_needs(topology: Topology, agent: Agent) -> ExitPolicy | None:
    """Return the needs of the early-exit policy that judges the agent."""
    cluster = topology.cluster_of.get(agent.id)
    if cluster is None or cluster.early_exit is None:
        return None
    return cluster.early_exit.needs


def may_draft(agent: Agent, models: Mapping[str, ServedModel]) -> bool | Literal["auto"]:
    """Return whether the agent asks for drafts; `auto` means only while they pay."""
    return agent.drafts and not agent.votes and models[agent.model].drafts


# --- tasks


async def build_tasks(
    outline: Outline,
) -> tuple[Mapping[str, AgentTask], Mapping[str, PromptRefused]]:
    """Return the task of every agent that asks a model, in topological order, or its refusal."""
    _check_offer(outline.topology, outline.request.offer)
    kept = outline.request.turn.kept
    slot_order = outline.topology.prefill.slot_order
    finish_s = expect_finish(outline)
    # agents that differ in their names alone share a prompt
    prompts: dict[tuple[object, ...], AgentPrompt] = {}
    tasks: dict[str, AgentTask] = {}
    refusals: dict[str, PromptRefused] = {}
    for number, agent in enumerate(outline.topology.agents.values()):
        if agent.votes:
            continue
        if agent.id in outline.topology.callers:
            order = agent.precursors  # the same in all requests of the turn
        else:
            order = order_slots(agent.precursors, slot_order, finish_s)
        options = repr(agent.chat_template_kwargs)
        is_alone = agent.id == outline.topology.root.id or kept is not NOTHING_KEPT
        alone = agent.id if is_alone else ""
        key = (agent.model, agent.prompt, agent.given, order, alone, options, agent.tools)
        try:
            if key not in prompts:
                prompts[key] = render_prompt(outline, agent, order)
            task = build_task(outline, agent, number, prompts[key])
            await check_task(task)
            tasks[agent.id] = task
        except PromptRefused as refusal:
            refusals[agent.id] = refusal
    return tasks, refusals


def _check_offer(topology: Topology, offer: ToolOffer | None) -> None:
    """Raise InvalidField if no agent may call tools, or more may call at once than are allowed."""
    if offer is None:
        return
    if not any(map(topology.may_call, topology.agents.values())):
        raise InvalidField(
            f"No agent of {topology.name!r} calls tools: its root votes, or has tools: off.",
            field="tools",
            remedy="Ask a topology whose root is a model and may call them.",
        )
    if not offer.parallel and len(topology.callers) > 1:
        raise InvalidField(
            f"Several agents of {topology.name!r} may call tools at once, so that a single call "
            "cannot be asked for.",
            field="parallel_tool_calls",
            remedy="Leave it out, and let tool_choice be auto or required.",
        )


def expect_finish(outline: Outline) -> Mapping[str, float]:
    """Return seconds to each agent's expected end, if slots are ordered by it."""
    if outline.topology.prefill.slot_order == "declared":
        return {}
    return outline.estimates.expect_finish_s(outline.topology)


def render_prompt(outline: Outline, agent: Agent, order: Sequence[str]) -> AgentPrompt:
    """Return the agent's prompt; the client's template options are for the root.

    Raises:
        PromptRefused: The model's template refuses the messages.
    """
    request = outline.request
    topology = outline.topology
    order = request.turn.slots.get(agent.id, order)
    model = outline.models[agent.model]
    options = agent.chat_template_kwargs or NO_OPTIONS
    tools = None
    chat = request.messages
    if agent.id == topology.root.id:
        options = {**options, **request.chat_template_kwargs}
        chat = select_messages(request, None, model.tokenizer.control)
    elif agent.id in topology.callers:
        chat = select_messages(request, agent.id, model.tokenizer.control)
    elif topology.keeps_proposals:
        chat = request.turn_messages  # their outputs hold for all requests of the turn
    if agent.id == topology.root.id or agent.id in topology.callers:
        offer = find_offer(topology, agent, request)
        tools = () if offer is None else offer.list_tools(model)
    try:
        return render_agent_prompt(agent, order, model, chat, options, tools)
    except PromptRefused as refusal:
        raise refusal.name_agent(agent.id, model.alias) from refusal


def build_task(outline: Outline, agent: Agent, number: int, prompt: AgentPrompt) -> AgentTask:
    """Return the task of one agent.

    `number` is unique in the run: SGLang aborts every request whose id begins with an aborted one,
    and `p-1` begins `p-10`.
    """
    topology = outline.topology
    request = outline.request
    model = outline.models[agent.model]
    is_root = agent.id == topology.root.id
    may_answer = is_root or topology.voters.get(agent.id)
    params = outline.sampling[agent.id]
    max_thinking_tokens = agent.max_thinking_tokens
    warning = ""
    if not is_root:
        params = {"stream_interval": choose_stream_interval(outline, agent), **params}
    elif request.max_thinking_tokens is not None:
        max_thinking_tokens = request.max_thinking_tokens
        if request.bends_limits and not model.limits_thinking:
            max_thinking_tokens = None
            warning = UNLIMITED_THINKING.format(model=model.alias)
    check_thinking_limit(agent.id, max_thinking_tokens, model)
    offer = find_offer(topology, agent, request)
    if offer is not None:
        params = ask_for_calls(params, offer, model)
    slots = [part.agent for part in prompt.parts if isinstance(part, Slot)]
    sources = {name: find_source(outline, name, model) for name in slots}
    return AgentTask(
        agent.id,
        f"{request.id}.{number}.{agent.id}",
        model,
        prompt.parts,
        params,
        logprobs=needs_confidence(outline, agent),
        timeout_s=request.timeout_s if request.tier == "batch" else agent.timeout_s,
        hints=outline.hints[agent.id],
        sources=sources,
        prefill=topology.prefill if agent.id in outline.growing else NO_UPDATES,
        begin_s=request.timeout_s,
        silence_s=request.timeout_s,
        drafts=bool(may_draft(agent, outline.models)) and agent.id not in outline.dropped_drafts,
        prediction=request.prediction if may_answer and model.drafts else "",
        marks=model.reasoning if is_root or agent.readers_get == "answer" else None,
        max_thinking_tokens=max_thinking_tokens,
        is_read=not is_root,
        offer=offer,
        may_shrink=bool(sources) and _has_most_room(outline, agent),
        affinity=_name_affinity(outline, agent),
        fits_context=request.bends_limits,
        warning=warning,
        messages=prompt.messages,
    )


def _name_affinity(outline: Outline, agent: Agent) -> str:
    """Return the name of the prompt that grows in the requests of a turn; empty for others."""
    turn = outline.request.turn.name
    if turn and agent.id in outline.topology.callers:
        return f"{turn}.{agent.id}"
    return turn if agent.id == outline.topology.root.id else ""


def _has_most_room(outline: Outline, agent: Agent) -> bool:
    """Return whether no fallback of the agent has more room for its output."""
    models = outline.models
    longest = max([models[name].context_length for name in (agent.model, *agent.fallbacks)])
    return models[agent.model].context_length == longest


def needs_confidence(outline: Outline, agent: Agent) -> bool:
    """Tell whether a gate, a vote or the client reads the agent's confidence."""
    topology = outline.topology
    needs = find_exit_needs(topology, agent)
    if agent.id in topology.voters or (needs is not None and needs.judges):
        return True
    return outline.request.confidence and agent.id == topology.root.id


def find_source(outline: Outline, precursor: str, reader: ServedModel) -> Source:
    """Return the log of `precursor`, whose ids `reader` takes if they share a tokenizer."""
    key = LogKey(outline.request.tenant, outline.request.id, precursor)
    vocabulary = reader.tokenizer.fingerprint
    kept = outline.request.turn.kept
    if precursor not in kept.outputs:
        return Source(key, vocabulary)
    text, ids = kept.outputs[precursor]
    read = LogRead(text, (), len(text), End.FINISHED if text else End.ABORTED)
    author = outline.models.get(kept.agents[precursor].model)
    if ids and author is not None:
        read = replace(read, ids=ids, vocabulary=author.tokenizer.fingerprint)
    return Source(key, vocabulary, read)


UNLIMITED_THINKING = (
    "The limit of thinking was ignored: the model {model!r} has no reasoning_parser. If it thinks, "
    "set models.{model}.reasoning_parser in the configuration."
)


def check_thinking_limit(agent: str, limit: int | None, model: ServedModel) -> None:
    """Raise InvalidRequest for a thinking limit if the model has no reasoning parser."""
    if limit is None or model.limits_thinking:
        return
    if model.takes_messages:
        raise InvalidRequest(
            f"Agent {agent!r} has max_thinking_tokens, which {model.alias!r} does not know.",
            remedy="Leave it out.",
        )
    raise InvalidRequest(
        f"Agent {agent!r} has max_thinking_tokens, and the model {model.alias!r} has no "
        "reasoning_parser.",
        remedy=f"Set models.{model.alias}.reasoning_parser in the configuration, or leave "
        "max_thinking_tokens out.",
    )
