"""Every key of a topology file, its form and its meaning, for the loader and for the editors' JSON
Schema.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shell_router.early_exit.settings import POLICIES
from shell_router.topology.document import Path, Problem
from shell_router.topology.forms import (
    Block,
    Either,
    Form,
    Json,
    ListOf,
    MappingOf,
    Number,
    OneOf,
    Schema,
    Switch,
    Text,
    model_name_form,
    name_form,
    spelled,
)
from shell_router.topology.prompting import template_pieces
from shell_router.topology.rules import SUBJECTS

MAX_STEPS = 100
MAX_RULES = 100


@dataclass(frozen=True, slots=True)
class Template(Form):
    """Prompt text in which only `placeholders` may stand, `once` exactly one time."""

    placeholders: tuple[str, ...]
    once: str = ""

    types = (str,)
    noun = "text"

    def problems(self, value: str, at: Path) -> Iterator[Problem]:
        try:
            names = [name for _, name in template_pieces(value) if name is not None]
        except ValueError as error:
            yield Problem(
                at, f"{spelled(at)}: {error}.", "Write {{ and }} for braces that are meant as text."
            )
            return
        for name in dict.fromkeys(names):
            if name not in self.placeholders:
                known = ", ".join(f"{{{one}}}" for one in self.placeholders)
                remedy = (
                    f"Known here: {known}; write {{{{ and }}}} for braces that are meant as text."
                )
                yield Problem(at, f"{spelled(at)}: unknown placeholder {{{name}}}.", remedy)
        if self.once and names.count(self.once) != 1:
            wrong = f"{spelled(at)} holds {{{self.once}}} {names.count(self.once)} times."
            yield Problem(at, wrong, f"Write {{{self.once}}} exactly once.")

    def schema(self) -> Schema:
        return {"type": "string", "description": self.about}


def _one_or_several(about: str, noun: str) -> Either:
    return Either(about, (Text(about), ListOf(about, Text(noun), at_least=1)))


WHEN = Block(
    "What has to hold, all of it.",
    {
        "label": MappingOf(
            "Values that labels of the request must have; of several values one.",
            Text("Label, as requests name it.", r".+", "a label"),
            _one_or_several("A value, or several of which one will do.", "Value."),
        ),
        "matches": Text(
            "Regular expression (RE2) that the text holds somewhere.", r".+", "a regular expression"
        ),
        "classifier": name_form("The classifier of the text; `is` names the classes."),
        "is": _one_or_several(
            "The class that the text must have, or several of which one will do.", "Class."
        ),
        "confidence_below": Number(
            "Holds when the step's output has a lower geometric mean token probability.",
            above=0,
            at_most=1,
        ),
        "score_below": MappingOf(
            (
                "Holds when the deployment's trained router gives each of these models a lower "
                "chance of being right."
            ),
            Text("Model alias.", r".*\S.*", "a model alias"),
            Number("The chance.", above=0, at_most=1),
        ),
        "of": OneOf(
            "Which text is meant; the request at the start, else the step's output.", SUBJECTS
        ),
    },
    name="when",
)

RULE = Block(
    "Leads to a step, or to the end, when something holds; without `when` always.",
    {"when": WHEN, "go": name_form("A step's id, or `end`.")},
    required=("go",),
    name="rule",
)


def _rules(about: str) -> Either:
    rules = ListOf(about, RULE, at_least=1, at_most=MAX_RULES, noun="a list of rules")
    return Either(about, (name_form("The step that always follows, or `end`."), rules))


CLASSIFIER = Block(
    "Classifies a text as its most similar example.",
    {
        "examples": MappingOf(
            "Texts by class.",
            Text("Class.", r".*\S.*", "a class"),
            ListOf(
                "Texts of this class.",
                Text("An example.", r".*\S.*", "a text"),
                at_least=1,
                at_most=1000,
            ),
        ),
        "min_similarity": Number(
            (
                "Least cosine similarity to the nearest example; a text that is less like any "
                "has no "
                "class."
            ),
            at_least=-1,
            at_most=1,
        ),
    },
    required=("examples",),
    name="classifier",
)

MAX_AGENTS = 1024
MAX_LAYERS = 32


def _alias(about: str) -> Text:
    return Text(about, r".*\S.*", "a model alias")


def _models(about: str) -> Either:
    """One model, `auto`, or several to choose from."""
    several = ListOf(
        "Models to choose from.",
        _alias("Model alias."),
        at_least=1,
        at_most=MAX_AGENTS,
        distinct=True,
    )
    return Either(about, (_alias("Model alias, or `auto`."), several))


PROMPT = Block(
    (
        "How the prompt is put together: prefix, a slot per precursor, suffix. Parts left out keep "
        "their defaults."
    ),
    {
        "system": Template("System message; empty for none. May hold {question}.", ("question",)),
        "prefix": Template(
            "Text before the slots; prefilled at once. {question} is the user's text.",
            ("question",),
        ),
        "slot": Template(
            (
                "Text around a precursor's {output}; may also hold {agent}, its id, and {index}, "
                "from 1."
            ),
            ("output", "agent", "index"),
            once="output",
        ),
        "suffix": Template(
            "Text after the slots. It cannot be prefilled early, so keep it short.", ("question",)
        ),
    },
    name="prompt",
)

_WORDS = "Text at which decoding stops."

SAMPLING = Block(
    "SGLang's sampling parameters. Other names are sent to the engine unchanged.",
    {
        "temperature": Number("0 decodes greedily.", at_least=0),
        "top_p": Number("Nucleus sampling.", above=0, at_most=1),
        "top_k": Number(
            "Sample from the k likeliest tokens; -1 from all.", at_least=-1, whole=True
        ),
        "min_p": Number(
            "Least probability relative to the likeliest token's.", at_least=0, at_most=1
        ),
        "max_new_tokens": Number("Most tokens to decode.", at_least=1, whole=True),
        "min_new_tokens": Number("Fewest tokens to decode.", at_least=0, whole=True),
        "frequency_penalty": Number("Penalty per earlier occurrence.", at_least=-2, at_most=2),
        "presence_penalty": Number("Penalty for having occurred.", at_least=-2, at_most=2),
        "repetition_penalty": Number("Above 1 discourages repetition.", above=0, at_most=2),
        "stop": Either(_WORDS, (Text(_WORDS), ListOf(_WORDS, Text(_WORDS)))),
        "stop_token_ids": ListOf(
            "Tokens at which decoding stops.", Number("Token id.", at_least=0, whole=True)
        ),
        "n": Number(
            "An agent has one output; add agents for more.", at_least=1, at_most=1, whole=True
        ),
    },
    open_to=Json("Sent to the engine unchanged."),
    name="sampling",
)

TEMPLATE_KWARGS = MappingOf(
    "Variables of the model's chat template, such as `enable_thinking: false`.",
    Text("Variable."),
    Json("Its value."),
    at_least=0,
)

_EARLY_EXIT_FIELDS = Block(
    "When a cluster's unfinished agents are cut off.",
    {
        "policy": OneOf(
            "; ".join(f"'{name}' {policy.meaning}" for name, policy in POLICIES.items()) + ".",
            tuple(POLICIES),
        ),
        "scope": OneOf(
            (
                "Which agents are judged together, without 'clusters': those with the same "
                "successors, or a whole layer."
            ),
            ("cluster", "layer"),
        ),
        "tau": Number("The preferred similarity of completed outputs.", above=0, at_most=1),
        "threshold": Number(
            "Used by the policies 'threshold' and 'in_flight'.", at_least=0, at_most=1
        ),
        "min_completed": Number(
            (
                "Outputs that must be complete before the first score; with 'in_flight', that "
                "state "
                "the leading answer."
            ),
            at_least=1,
            whole=True,
        ),
        "grace_s": Number(
            "With 'quorum': seconds that the others get once min_completed have ended.",
            at_least=0,
            at_most=86_400,
        ),
        "self_similarity": Switch(
            "Whether P counts each output as similar to itself, as the paper's does."
        ),
        "skip_aggregation": Switch(
            "With 'in_flight': if the cluster agrees, agents that read only it are skipped and "
            "forward its answer."
        ),
    },
    name="early_exit",
)
_EARLY_EXIT_SWITCH = Switch(
    "'on' takes the topology's settings, or the defaults; 'off' lets all agents finish."
)
EARLY_EXIT = Either("Early exit: settings, on, or off.", (_EARLY_EXIT_FIELDS, _EARLY_EXIT_SWITCH))

PREFILL = Block(
    "Whether and how successors are prefilled while their precursors decode.",
    {
        "incremental": Switch("Prefill successors while precursors decode."),
        "chunk_tokens": Either(
            "New tokens per prefill-only update.",
            (
                Number("Fixed.", at_least=1, whole=True),
                OneOf("An update goes out when it pays, by measured costs.", ("adaptive",)),
            ),
        ),
        "slot_order": OneOf(
            (
                "'declared', or 'expected_finish' to put the precursor expected to end first in "
                "the "
                "first slot."
            ),
            ("declared", "expected_finish"),
        ),
    },
)

ON_FAILURE = OneOf(
    (
        "A failed agent fails the request, or is dropped and its slot left out; a failed root "
        "always "
        "fails it."
    ),
    ("fail", "drop"),
)

_ASKED: dict[str, Form] = {
    "prompt": PROMPT,
    "sampling": SAMPLING,
    "timeout_s": Number(
        "Seconds the agent may take from its start to its end.", above=0, at_most=86_400
    ),
    "chat_template_kwargs": TEMPLATE_KWARGS,
    "max_thinking_tokens": Number(
        (
            "Tokens after which its thinking is ended and it has to answer; needs the model's "
            "`reasoning_parser`."
        ),
        at_least=1,
        whole=True,
    ),
    "readers_get": OneOf(
        (
            "What of its output other agents read, and early exit compares: 'answer', or 'all', "
            "with "
            "its thinking."
        ),
        ("answer", "all"),
    ),
    "drafts": Switch(
        "Draft its output from its prompt, where its engine can; on for agents that read others."
    ),
}
_SHARED: dict[str, Form] = {**_ASKED, "on_failure": ON_FAILURE}

VOTE = OneOf(
    (
        "Asks no model: forwards the output whose stated answer most precursors share; goes "
        "without "
        "a model and a prompt."
    ),
    ("majority",),
)

DEFAULTS = Block(
    "What agents are given unless they say otherwise.",
    {"model": _models("As an agent's."), **_SHARED},
)

_ONE_MODEL = _models(
    "Model alias, from the deployment's configuration; a list of them, or `auto` for the "
    "deployment's, to have one "
    "chosen for each request."
)

AGENT = Block(
    "One agent.",
    {
        "model": _ONE_MODEL,
        "fallbacks": ListOf(
            (
                "Models that take its place, one after the other, where its model fails before it "
                "has written anything."
            ),
            _alias("Model alias."),
            at_most=16,
        ),
        "vote": VOTE,
        "precursors": ListOf(
            "Agents whose outputs it reads, in slot order.", name_form("Agent id."), distinct=True
        ),
        **_SHARED,
    },
    name="agent",
)

ROLE = Block("What the agents of this role are given.", {"vote": VOTE, **_SHARED}, name="role")

LAYERED_FIELDS: dict[str, Form] = {
    "shape": ListOf(
        "Agents per layer, leaves first; the last is 1.",
        Number("Agents in this layer.", at_least=1, at_most=MAX_AGENTS, whole=True),
        at_least=2,
        at_most=MAX_LAYERS,
    ),
    "models": ListOf(
        "Model aliases, or `auto`; the agents of each layer take turns.",
        _alias("Model alias."),
        at_least=1,
    ),
    "root_model": _alias("The root's model alias, or `auto`; by default the last of `models`."),
    "proposer": ROLE,
    "aggregator": ROLE,
    "root": ROLE,
}


def _layered(about: str) -> Block:
    return Block(about, LAYERED_FIELDS, required=("shape", "models"))


CLUSTER = Block(
    "Agents that are judged together.",
    {
        "agents": ListOf("Members.", name_form("Agent id."), at_least=1),
        "early_exit": EARLY_EXIT,
    },
    required=("agents",),
    name="cluster",
)

STEP = Block(
    "One step: an agent, or with `topology` a whole topology.",
    {
        "model": _ONE_MODEL,
        "precursors": ListOf(
            "Earlier steps whose outputs it reads, in slot order.",
            name_form("Step id."),
            distinct=True,
        ),
        **_ASKED,
        "topology": model_name_form("A topology's name: the step asks all of it."),
        "then": _rules(
            "What follows: a step's id, or rules, of which the first that holds is taken; by "
            "default `end`."
        ),
    },
    name="step",
)

GRAPH_FORMS = ("tree", "all_to_all", "agents", "steps")
"""Exactly one of these keys describes the graph."""

TOPOLOGY = Block(
    "A graph of agents that answers a question.",
    {
        "name": model_name_form(
            "The name requests ask for; by default the file's name without its ending."
        ),
        "description": Text("One line for people."),
        "tree": _layered("Every agent is read by one successor; layer sizes divide one another."),
        "all_to_all": _layered("Every agent reads all agents of the layer before."),
        "agents": MappingOf("The graph, agent by agent.", name_form("Agent id."), AGENT),
        "steps": MappingOf(
            "Steps that run one after the other, chosen by rules.", name_form("Step id."), STEP
        ),
        "start": _rules(
            "Which step is first: its id, or rules, of which the first that holds is taken."
        ),
        "classifiers": MappingOf(
            "Classifiers of texts, by name.", name_form("Classifier id."), CLASSIFIER
        ),
        "clusters": MappingOf(
            "Which agents are judged together; by default those with the same successors.",
            name_form("Cluster id."),
            CLUSTER,
        ),
        "early_exit": EARLY_EXIT,
        "prefill": PREFILL,
        "defaults": DEFAULTS,
        "on_failure": ON_FAILURE,
    },
)

DEFINITIONS = (
    PROMPT,
    SAMPLING,
    _EARLY_EXIT_FIELDS,
    AGENT,
    ROLE,
    CLUSTER,
    STEP,
    RULE,
    WHEN,
    CLASSIFIER,
)
"""The blocks that the JSON Schema refers to by name."""


def json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of a topology file: keys, kinds and bounds, but neither names nor the
    graph.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Shell router topology",
        **TOPOLOGY.definition(),
        "oneOf": [{"required": [form]} for form in GRAPH_FORMS],
        "$defs": {block.name: block.definition() for block in DEFINITIONS},
    }
