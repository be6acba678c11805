"""What is decided, and refused, before the first agent of a request runs: models, sampling,
prompts, expectations.
"""

import random
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

from agent_cache import LogKey
from shell_router.core.engine import NO_OPTIONS, Hints, ServedModel, Tokenizer
from shell_router.core.events import Emit, Event
from shell_router.core.predictors import NO_FORECAST, Forecast, Prospect
from shell_router.core.sampling import require_possible
from shell_router.errors import InvalidField, InvalidRequest
from shell_router.moa.agent import FORMS, AgentTask, Source, check_task, limited
from shell_router.moa.calls import ToolOffer
from shell_router.moa.choosing import LatencyEstimates, ModelChooser, require_models
from shell_router.moa.prompt import CHARACTERS_PER_TOKEN, Part, agent_parts, off_loop
from shell_router.moa.requests import (
    AgentRequest,
    AgentUsage,
    Answer,
    MoaRequest,
    OutputOf,
    Segment,
    place_of_question,
)
from shell_router.routing.holdout import Compared, Holdouts
from shell_router.routing.increments import fewest_tokens, order_slots, tokens_per_event
from shell_router.topology import AUTO, INLINE, Agent, Prefill, Topology
from shell_router.topology.prompting import fill_text

PLAIN_REQUEST = "plain request"
"""The workflow of requests that name a model, not a topology, so that they are alike whether it was
chosen or not.
"""

AGENT_REQUEST = "agent request"
"""The workflow of agents that an external framework sends: which graph it walks is not known."""

NO_UPDATES = Prefill(incremental=False)

DRAFTED_FROM = 1000
"""A plain request asks for drafts if its messages have this many characters: shorter ones hold
little to repeat.
"""

Sampling = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Plan:
    """A request's graph with models chosen, and what each of its agents is to do.

    `hints` hold what is expected of each agent. `choices` are to be emitted once nothing can be
    refused any more: a stream's head goes out with the first event. `growing` are the agents whose
    prompts are prefilled while they grow, each with the fewest tokens of an update. `held_out` is,
    per optimization that could pay, whether the run goes without it, for comparison.
    """

    topology: Topology
    request: MoaRequest
    models: Mapping[str, ServedModel]
    estimates: LatencyEstimates
    sampling: Mapping[str, Sampling]
    hints: Mapping[str, Hints]
    choices: Sequence[Event]
    growing: Mapping[str, float] = field(default_factory=dict)
    held_out: Mapping[Compared, bool] = field(default_factory=dict)
    tasks: Mapping[str, AgentTask] = field(default_factory=dict)

    @property
    def expected(self) -> Mapping[str, tuple[str, float]]:
        """Each agent's model and expected output tokens."""
        found = {}
        for agent in self.topology.agents.values():
            tokens = self.hints[agent.id].output_tokens
            limit = self.sampling[agent.id]["max_new_tokens"]
            found[agent.id] = agent.model, float(limit) if tokens is None else tokens
        return found

    async def instead(self, agent: str, attempt: int) -> AgentTask:
        """The task of an agent with its fallback of this number. Raises PromptTooLong."""
        model = self.topology.agents[agent].fallbacks[attempt]
        topology = self.topology.with_models({agent: model})
        request = self.request
        if self.models[model].reasoning is None:  # the limit was the failed model's
            unlimited = replace(topology.agents[agent], max_thinking_tokens=None)
            topology = replace(topology, agents={**topology.agents, agent: unlimited})
            request = replace(request, max_thinking_tokens=None)
        task = replace(self, topology=topology, request=request, growing={}).made_tasks()[agent]
        await check_task(task)
        # engines abort whatever begins with the id of the attempt before
        return replace(task, rid=f"{request.id}.{len(topology.agents) + attempt}.{agent}")

    # --- tasks

    def made_tasks(self) -> Mapping[str, AgentTask]:
        """The task of every agent that asks a model, in topological order.

        Request ids are numbered, since SGLang aborts every request whose id begins with the given
        one, and `p-1` begins `p-10`.
        """
        topology = self.topology
        request = self.request
        prefill = topology.prefill
        limit_s = request.timeout_s
        if prefill.slot_order == "expected_finish":
            finish_s = self.estimates.expected_finish_s(topology)
        else:
            finish_s = {}
        if request.offer is not None:
            self._check_offer(request.offer)
        shared: dict[
            tuple[object, ...], tuple[Part, ...]
        ] = {}  # prompts of agents that differ in their names alone
        tasks = {}
        for number, agent in enumerate(topology.agents.values()):
            if agent.votes:
                continue
            model = self.models[agent.model]
            if agent.precursors:
                order = order_slots(agent.precursors, prefill.slot_order, finish_s)
            else:
                order = ()
            is_root = agent.id == topology.root.id
            options = {
                **agent.chat_template_kwargs,
                **(request.chat_template_kwargs if is_root else NO_OPTIONS),
            }
            offer = request.offer if is_root else None
            if is_root:
                asked = request.max_thinking_tokens
            else:
                asked = None
            same = model.alias, agent.prompt, agent.given, order, is_root, repr(options)
            if same not in shared:
                if is_root:
                    tools = (()) if (offer is None) else (offer.shown_by(model))
                else:
                    tools = None
                shared[same] = agent_parts(agent, order, model, request.messages, options, tools)
            cluster = topology.cluster_of.get(agent.id)
            judged = (
                cluster is not None
                and cluster.early_exit is not None
                and cluster.early_exit.needs.judges
            )
            params = self.sampling[agent.id]
            answers = is_root or topology.voters.get(agent.id)
            if not is_root:
                params = {"stream_interval": self._stream_interval(agent), **params}
            tasks[agent.id] = AgentTask(
                agent.id,
                f"{request.id}.{number}.{agent.id}",
                model,
                shared[same],
                params,
                logprobs=judged or agent.id in topology.voters or (request.confidence and is_root),
                timeout_s=agent.timeout_s,
                hints=self.hints[agent.id],
                sources={name: self._source(name, model) for name in agent.precursors},
                prefill=prefill if agent.id in self.growing else NO_UPDATES,
                begin_s=limit_s,
                silence_s=limit_s,
                drafts=bool(may_draft(agent, self.models))
                and not self.held_out.get(drafts_of(topology, agent)),
                prediction=request.prediction if answers and model.drafts else "",
                marks=model.reasoning if is_root or agent.readers_get == "answer" else None,
                max_thinking_tokens=thinking_limit(
                    agent.id, agent.max_thinking_tokens if asked is None else asked, model
                ),
                is_read=not is_root,
                offer=offer,
            )
        return tasks

    def _check_offer(self, offer: ToolOffer) -> None:
        """Raise InvalidField where tools are offered to an agent that cannot call them."""
        root = self.topology.root
        if root.votes:
            remedy = "Ask a topology whose root is a model."
            raise InvalidField(
                f"The root of {self.topology.name!r} votes and calls no tools.",
                field="tools",
                remedy=remedy,
            )
        for model in (root.model, *root.fallbacks):
            served = self.models[model]
            if not offer.must_call and served.call_mark is None and served.engines_parser is None:
                remedy = (
                    f"Set models.{model}.tool_call_parser in the configuration, start its "
                    "servers with"
                    " --tool-call-parser, or set tool_choice to required or a function."
                )
                raise InvalidField(
                    f"How {model!r} writes calls of tools is not known.",
                    field="tools",
                    remedy=remedy,
                )

    def _source(self, precursor: str, reader: ServedModel) -> Source:
        writer = self.topology.agents[precursor]
        writers = (()) if (writer.votes) else ((writer.model, *writer.fallbacks))
        sampling = self.sampling[precursor]
        shares_ids = bool(writers) and all(
            ids_are_text(self.models[one], sampling, reader) for one in writers
        )
        return Source(LogKey(self.request.tenant, self.request.id, precursor), lambda: shares_ids)

    # --- incremental prefill

    def growing_prompts(self, asked: int) -> Mapping[str, float]:
        """The agents whose prompts may be prefilled while they grow, each with the fewest tokens of
        an update.

        Clients' messages have `asked` characters. Where no update can pay, neither is one judged
        nor do precursors write in smaller pieces: the run is that of a topology without incremental
        prefill.
        """
        chunk = self.topology.prefill.chunk_tokens
        found = {}
        if not self.topology.prefill.incremental:
            return {}
        for agent in self.topology.agents.values():
            if not agent.precursors or agent.votes:
                continue
            if chunk != "adaptive":
                found[agent.id] = float(chunk)
                continue
            text = (
                asked
                + len(agent.prompt.prefix)
                + len(agent.prompt.suffix)
                + sum(len(said) for _, said in agent.given)
            )
            tokens = text / CHARACTERS_PER_TOKEN
            for precursor in agent.precursors:
                written = self.hints[precursor].output_tokens
                tokens += (
                    self.sampling[precursor]["max_new_tokens"] / 2 if written is None else written
                )
            fewest = fewest_tokens(self.estimates.prefill(self.models[agent.model]).cost)
            if tokens > fewest:
                found[agent.id] = fewest
        return found

    def _stream_interval(self, agent: Agent) -> int:
        """How many tokens of the agent its readers, and the judge of its cluster, want at a
        time."""
        cluster = self.topology.cluster_of.get(agent.id)
        if cluster is not None:
            exits = cluster.early_exit
        else:
            exits = None
        judged = exits is not None and exits.needs.reads_streams
        wanted = (
            self.growing[reader]
            for reader in self.topology.successors[agent.id]
            if reader in self.growing
        )
        return tokens_per_event(min(wanted, default=None), judged=judged)

    # --- hold-outs

    def hold_out(self, holdouts: Holdouts, now_s: float) -> None:
        """Decide which optimizations that could pay the run goes without, for comparison."""
        topology = self.topology
        keys = [
            drafts_of(topology, one)
            for one in topology.agents.values()
            if may_draft(one, self.models) == "auto"
        ]
        if self.growing:
            of = _compared_as(topology)
            updates = Compared(
                "incremental_prefill",
                of,
                "" if of == INLINE else ", ".join(sorted(topology.models)),
            )
            keys.insert(0, updates)
        if not keys:
            return
        # by the question, too: a client with one seed for all would be a group of its own
        seed = f"{self.request.seed}/{self.request.question[-1000:]}"
        self.held_out = {
            key: holdouts.holds_out(
                key, random.Random(f"{key.optimization}/{seed}").random(), now_s
            )
            for key in dict.fromkeys(keys)
        }
        if self.growing and self.held_out[updates]:
            self.growing = {}

    def compare(self, holdouts: Holdouts, answer: Answer, seconds: float, now_s: float) -> None:
        """The run has ended after so long."""
        for key, held_out in self.held_out.items():
            if key.optimization == "incremental_prefill":
                holdouts.observe(key, held_out=held_out, seconds=seconds, now_s=now_s)
                continue
            agents = [
                self.topology.agents[name]
                for name, task in self.tasks.items()
                if not task.prediction
            ]
            found = [
                answer.agents[one.id]
                for one in agents
                if one.drafts and drafts_of(self.topology, one) == key
            ]
            used = [one for one in found if one.model == key.models]  # and not its fallback
            compare_drafts(holdouts, key, used, held_out=held_out, now_s=now_s)


async def plan_run(
    chooser: ModelChooser,
    models: Mapping[str, ServedModel],
    topology: Topology,
    request: MoaRequest,
    holdouts: Holdouts,
) -> Plan:
    """Choose a model for every agent that names several; agents with the same candidates share one
    (the paper's assignment per program). Raises UnknownModel, InvalidRequest and PromptTooLong.

    Unless a prompt is so long that it has to be tokenized, nothing happens between the choice and
    the return, so that no other request is chosen for by the same load.
    """
    asked = sum([len(message["content"]) for message in request.messages])
    require_possible(asked, max([model.context_length for model in models.values()]))
    choices: list[Event] = []
    sampling = {agent.id: _sampling(topology, agent, request) for agent in topology.agents.values()}
    require_models(f"Topology {topology.name!r}", topology.models - {AUTO}, models)
    forecasts: Mapping[str, Forecast] = {}
    if chooser.predicts or AUTO in topology.models:
        topology, forecasts = await _choose(
            chooser, models, topology, request, sampling, choices.append
        )
    if asked >= DRAFTED_FROM and (topology.name == AUTO or topology.name in models):
        topology = replace(topology, agents={topology.name: replace(topology.root, drafts=True)})
    hints = hints_of(topology, chooser.estimates, request, forecasts)
    plan = Plan(topology, request, models, chooser.estimates, sampling, hints, choices)
    plan.growing = plan.growing_prompts(asked)
    plan.hold_out(holdouts, chooser.clock())
    plan.tasks = plan.made_tasks()
    for task in plan.tasks.values():
        await check_task(task)
    return plan


def _sampling(topology: Topology, agent: Agent, request: MoaRequest) -> Sampling:
    """The client's own sampling holds for the root. A seed of it holds for all, each agent with one
    of its own (31 bits). Where the root votes, agents whose outputs may be the answer keep their
    own sampling, within the length and in the form that the client asks for."""
    if agent.id == topology.root.id:
        return limited({**agent.sampling, **request.sampling})
    merged: dict[str, Any] = {}
    seed = request.sampling.get("sampling_seed")
    if seed is not None:
        merged["sampling_seed"] = zlib.crc32(f"{seed}/{agent.id}".encode()) >> 1
    asked = {
        name: request.sampling[name]
        for name in ("max_new_tokens", *FORMS)
        if name in request.sampling
    }
    return limited({**merged, **agent.sampling, **(asked if topology.voters.get(agent.id) else {})})


def thinking_limit(agent: str, limit: int | None, model: ServedModel) -> int | None:
    """The `limit` of an agent's thinking. Raises InvalidRequest where the model's thinking is not
    known.
    """
    if limit is not None and model.reasoning is None:
        raise InvalidRequest(
            (
                f"Agent {agent!r} has max_thinking_tokens, and the model {model.alias!r} has no "
                "reasoning_parser."
            ),
            remedy=(
                f"Set models.{model.alias}.reasoning_parser in the configuration, or leave "
                "max_thinking_tokens out."
            ),
        )
    return limit


def ids_are_text(writer: ServedModel, sampling: Sampling, reader: ServedModel) -> bool:
    """Whether `reader` may take a writer's ids for its text.

    They must share a tokenizer; and where a stop string ended the output, it is in the ids but not
    in the text, as may be a part of the mark that ends thinking.
    """
    same = writer.tokenizer.fingerprint == reader.tokenizer.fingerprint
    return same and writer.reasoning is None and not sampling.get("stop")


# --- what is compared with programs that are held out


def may_draft(agent: Agent, models: Mapping[str, ServedModel]) -> bool | Literal["auto"]:
    """Whether the agent asks for drafts; with `auto` it does where they pay."""
    return agent.drafts and not agent.votes and models[agent.model].drafts


def drafts_of(topology: Topology, agent: Agent) -> Compared:
    """The agents whose drafts are judged with this one's."""
    return Compared("drafts", _compared_as(topology), agent.model, role_of(topology, agent))


def _compared_as(topology: Topology) -> str:
    """Topologies inside of requests are compared together: few runs share one."""
    if topology.name.startswith(f"{INLINE}/"):
        return INLINE
    return topology.name


def role_of(topology: Topology, agent: Agent) -> str:
    """The root, an aggregator, which reads others, or a proposer."""
    if agent.id == topology.root.id:
        return "root"
    if agent.precursors:
        return "aggregator"
    return "proposer"


def compare_drafts(
    holdouts: Holdouts, key: Compared, agents: Sequence[AgentUsage], *, held_out: bool, now_s: float
) -> None:
    """Agents of one program have written. Nothing is compared before an engine has drafted for some
    of `key`.
    """
    token_s = [one.token_s for one in agents if one.token_s is not None]
    if token_s and (key in holdouts or any(one.drafted_tokens for one in agents)):
        holdouts.observe(key, held_out=held_out, seconds=fmean(token_s), now_s=now_s)


# --- expectations


def hints_of(
    topology: Topology,
    estimates: LatencyEstimates,
    request: MoaRequest,
    forecasts: Mapping[str, Forecast],
) -> Mapping[str, Hints]:
    """The hints of each agent of `request`'s run of `topology`.

    An agent's output tokens are as predicted, else its own mean so far, else its model's mean; None
    for a new model; 0 for a vote. It gets no total if nothing is expected of one that follows it.
    """
    found: dict[str, Hints] = {}
    after: dict[str, set[str]] = {}
    for agent in reversed(tuple(topology.agents.values())):
        forecast = forecasts.get(agent.id, NO_FORECAST)
        tokens = (0.0) if (agent.votes) else (forecast.own_tokens.get(agent.model))
        if tokens is None:
            tokens = estimates.output_tokens(agent.model, topology.name, agent.id)
        following = after[agent.id] = {agent.id}.union(
            *(after[one] for one in topology.successors[agent.id])
        )
        rest = [found[one].output_tokens for one in found if one in following]
        known = [one for one in rest if one is not None]
        total = None
        if tokens is not None and len(known) == len(rest):
            total = forecast.total_tokens.get(agent.model, tokens + sum(known))
        found[agent.id] = Hints(
            request.tenant, request.id, topology.name, agent.id, tokens, total, request.end_user
        )
    return found


# --- choices of models


async def _choose(
    chooser: ModelChooser,
    models: Mapping[str, ServedModel],
    topology: Topology,
    request: MoaRequest,
    sampling: Mapping[str, Sampling],
    emit: Emit,
) -> tuple[Topology, Mapping[str, Forecast]]:
    """The topology with a model for every agent, and what is predicted of each. `emit` gets each
    choice.
    """
    started_s = chooser.clock()
    known = {
        agent.id: known_of_agent(agent, request.messages) for agent in topology.agents.values()
    }
    open_to = {
        agent.id: await _fitting(
            sampling[agent.id], chooser.candidates(agent.candidates), known[agent.id], models
        )
        for agent in topology.agents.values()
        if agent.model == AUTO
    }
    if chooser.predicts:
        forecasts = await _forecasts(chooser, models, topology, known, open_to, emit)
    else:
        forecasts = {}
    chosen: dict[str, str] = {}
    for candidates in dict.fromkeys(open_to.values()):
        agents = tuple(agent for agent, of in open_to.items() if of == candidates)
        model = chooser.choose(
            agents, candidates, forecasts.get(agents[0], NO_FORECAST), started_s, emit
        )
        chosen |= dict.fromkeys(agents, model)
    return topology.with_models(chosen), forecasts


async def _forecasts(
    chooser: ModelChooser,
    models: Mapping[str, ServedModel],
    topology: Topology,
    known: Mapping[str, "KnownPrompt"],
    open_to: Mapping[str, tuple[str, ...]],
    emit: Emit,
) -> Mapping[str, Forecast]:
    """Of agents with the same candidates only the first is scored, since they share one choice."""
    asked = {
        one.id: open_to.get(one.id, (one.model,))
        for one in topology.agents.values()
        if not one.votes
    }
    to_score = {candidates for candidates in open_to.values() if chooser.scores_decide(candidates)}

    def prospects() -> list[Prospect]:
        stages = stages_of(topology)
        workflow = workflow_of(topology)
        found = []
        for agent, candidates in asked.items():
            scored = agent in open_to and candidates in to_score
            to_score.discard(candidates)
            tokenizer = models[candidates[0]].tokenizer
            found.append(
                known[agent].prospect(tokenizer, workflow, stages[agent], candidates, scored)
            )
        return found

    characters = sum(known[agent].characters for agent in asked)
    found = await chooser.forecasts(await off_loop(characters, prospects), emit)
    return dict(zip(asked, found, strict=True))


async def _fitting(
    sampling: Sampling,
    candidates: tuple[str, ...],
    known: "KnownPrompt",
    models: Mapping[str, ServedModel],
) -> tuple[str, ...]:
    """The candidates whose context takes what is known already; all if none does: then the request
    is refused by name.

    A text has hardly more tokens than bytes, so short ones need no tokenizing.
    """
    limit = sampling["max_new_tokens"]
    if 4 * known.characters + limit <= min(models[name].context_length for name in candidates):
        return candidates
    fitting = []
    for name in candidates:
        _, _, tokens = await off_loop(
            known.characters, partial(known.tokens, models[name].tokenizer)
        )
        if tokens + limit <= models[name].context_length:
            fitting.append(name)
    return tuple(fitting) or candidates


async def plan_agent(
    chooser: ModelChooser,
    models: Mapping[str, ServedModel],
    request: AgentRequest,
    chosen: MutableMapping[tuple[str, ...], str],
    emit: Emit,
) -> tuple[str, Hints]:
    """The model of an external program's agent, chosen if it names several, and the hints of its
    requests.

    `chosen` is its program's model among these candidates. What follows an agent in its program is
    not known, unless a predictor has learned it. Raises UnknownModel.
    """
    auto = request.model == AUTO
    if auto:
        candidates = chooser.candidates(request.candidates)
    else:
        candidates = (request.model,)
    require_models(f"Agent {request.agent!r}", candidates, models)
    forecast = NO_FORECAST
    started_s = chooser.clock()
    if chooser.predicts:
        scored = auto and candidates not in chosen and chooser.scores_decide(candidates)
        known = known_of_request(request)
        tokenizer = models[candidates[0]].tokenizer
        if request.chat:
            stage = PLAIN_REQUEST
        else:
            stage = request.agent
        asks = partial(known.prospect, tokenizer, AGENT_REQUEST, stage, candidates, scored)
        (forecast,) = await chooser.forecasts([await off_loop(known.characters, asks)], emit)
    if not auto:
        model = request.model
    elif (
        candidates in chosen
    ):  # or, while the predictors were asked, another agent of the program was first
        model = chooser.kept((request.agent,), chosen[candidates], emit)
    else:
        model = chosen[candidates] = chooser.choose(
            (request.agent,), candidates, forecast, started_s, emit
        )
    name = (
        None if request.chat else request.agent
    )  # a random one says nothing of the agents to come
    own = forecast.own_tokens.get(
        model, chooser.estimates.output_tokens(model, None, name, request.tenant)
    )
    total = forecast.total_tokens.get(model)
    return model, Hints(
        request.tenant, request.program, None, name, own, total, end_user=request.end_user
    )


def workflow_of(topology: Topology) -> str:
    """The topology's name; all plain requests to a model, or to one of several, are of one
    workflow.
    """
    plain = len(topology.agents) == 1 and topology.root.id == topology.name
    return PLAIN_REQUEST if plain else topology.name


def stages_of(topology: Topology) -> Mapping[str, str]:
    """Per agent its stage in the workflow: the number of its layer, leaves 1."""
    return {
        agent: str(number)
        for number, layer in enumerate(topology.layers, start=1)
        for agent in layer
    }


# --- what is known of prompts before other agents have written


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """The texts of a prompt without the outputs that will stand in it and without the chat
    template's marks.

    `system` is the system prompt, `user` the client's question, `rest` all other text. Where a
    framework sends raw segments, what it wrote is the question.
    """

    system: str
    user: str
    rest: str

    def tokens(self, tokenizer: Tokenizer) -> tuple[int, int, int]:
        """How long the system prompt, the question, and all of it are."""
        system, user, rest = (
            len(tokenizer.encode(text)) if text else 0
            for text in (self.system, self.user, self.rest)
        )
        return system, user, system + user + rest

    def prospect(
        self, tokenizer: Tokenizer, workflow: str, stage: str, models: tuple[str, ...], scored: bool
    ) -> Prospect:
        """What predictors are asked of an agent with this prompt."""
        return Prospect(workflow, stage, self.user, *self.tokens(tokenizer), models, scored)

    @property
    def characters(self) -> int:
        """Of all texts."""
        return len(self.system) + len(self.user) + len(self.rest)


def known_of_agent(agent: Agent, chat: Sequence[Mapping[str, str]]) -> KnownPrompt:
    """A topology's agent that is asked the last message of `chat`."""
    place = place_of_question(chat)
    question = chat[place]["content"]
    others = [*chat[:place], *chat[place + 1 :]]
    if agent.prompt.system:
        system = [fill_text(agent.prompt.system, question)]
    else:
        system = []
    system += [turn["content"] for turn in others if turn["role"] == "system"]
    rest = [turn["content"] for turn in others if turn["role"] != "system"]
    rest += [fill_text(agent.prompt.prefix, ""), fill_text(agent.prompt.suffix, "")]
    return KnownPrompt("\n\n".join(system), question, "\n".join(filter(None, rest)))


def known_of_request(request: AgentRequest) -> KnownPrompt:
    """An agent of an external framework's program."""

    def text(segments: Sequence[Segment]) -> str:
        return "".join(segment for segment in segments if not isinstance(segment, OutputOf))

    if request.prompt:
        return KnownPrompt("", text(request.prompt), "")
    said: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    for role, segments in request.messages:
        said.setdefault(role, []).append(text(segments))
    question = said["user"].pop() if said["user"] else ""
    return KnownPrompt(
        "\n\n".join(said["system"]), question, "\n".join(said["user"] + said["assistant"])
    )
