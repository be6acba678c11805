"""Every key of a topology file, its form and its meaning, for the loader and for the editors' schema."""

from shell_router.early_exit import POLICIES
from shell_router.topology.blocks import Block, Either, Json, ListOf, MappingOf
from shell_router.topology.grammar import Choice, Form, Number, Switch, Template, Text
from shell_router.topology.names import name_form
from shell_router.topology.step_syntax import CLASSIFIER, RULE, START_RULES, STEP_FIELDS, WHEN

MAX_AGENTS = 1024
MAX_LAYERS = 32


def _alias(about: str) -> Text:
    return Text(about, r".*\S.*", "a model alias")


def _models(about: str) -> Either:
    """One model, `auto`, or several to choose from."""
    several = ListOf("Models to choose from.", _alias("Model alias."), at_least=1)
    return Either(about, (_alias("Model alias, or `auto`."), several))


PROMPT = Block(
    "How the prompt is put together: prefix, a slot per precursor, suffix. Parts left out keep their defaults.",
    {
        "system": Template("System message; empty for none. May hold {question}.", ("question",)),
        "prefix": Template("Text before the slots; prefilled at once. {question} is the user's text.", ("question",)),
        "slot": Template(
            "Text around a precursor's {output}; may also hold {agent}, its id, and {index}, from 1.",
            ("output", "agent", "index"),
            once="output",
        ),
        "suffix": Template("Text after the slots. It cannot be prefilled early, so keep it short.", ("question",)),
    },
    name="prompt",
)

_WORDS = "Text at which decoding stops."

SAMPLING = Block(
    "SGLang's sampling parameters. Names beyond these are passed on unchanged.",
    {
        "temperature": Number("0 decodes greedily.", at_least=0),
        "top_p": Number("Nucleus sampling.", above=0, at_most=1),
        "top_k": Number("Sample from so many tokens; -1 for all.", at_least=-1, whole=True),
        "min_p": Number("Least probability relative to the likeliest token's.", at_least=0, at_most=1),
        "max_new_tokens": Number("Most tokens to decode.", at_least=1, whole=True),
        "min_new_tokens": Number("Fewest tokens to decode.", at_least=0, whole=True),
        "frequency_penalty": Number("Penalty per earlier occurrence.", at_least=-2, at_most=2),
        "presence_penalty": Number("Penalty for having occurred.", at_least=-2, at_most=2),
        "repetition_penalty": Number("Above 1 discourages repetition.", above=0, at_most=2),
        "stop": Either(_WORDS, (Text(_WORDS), ListOf(_WORDS, Text(_WORDS)))),
        "stop_token_ids": ListOf("Tokens at which decoding stops.", Number("Token id.", at_least=0, whole=True)),
        "n": Number("An agent has one output; add agents for more.", at_least=1, at_most=1, whole=True),
    },
    open_to=Json("Passed on unchanged."),
    name="sampling",
)

_EARLY_EXIT_FIELDS = Block(
    "When a cluster's unfinished agents are cut off.",
    {
        "policy": Choice(
            "'stochastic', the paper's, exits with probability Q; 'threshold' exits at Q >= threshold; 'in_flight' "
            "reads unfinished outputs too and exits when the leading answer's support reaches threshold.",
            POLICIES,
        ),
        "tau": Number("The preferred similarity of completed outputs.", above=0, at_most=1),
        "threshold": Number("Used by the policies 'threshold' and 'in_flight'.", at_least=0, at_most=1),
        "min_completed": Number(
            "Outputs that must be complete before the first score; with 'in_flight', that state the leading answer.",
            at_least=1,
            whole=True,
        ),
        "similarity": Choice(
            "'full' is the paper's; 'off_diagonal' leaves out the correlation matrices' diagonals.",
            ("full", "off_diagonal"),
        ),
        "pass_on": Switch(
            "With 'in_flight': who reads just this cluster writes nothing where it agrees, and passes the answer on."
        ),
    },
    name="early_exit",
)
_EARLY_EXIT_SWITCH = Switch("'on' takes the topology's settings, or the defaults; 'off' lets everybody finish.")
EARLY_EXIT = Either("Early exit: settings, on, or off.", (_EARLY_EXIT_FIELDS, _EARLY_EXIT_SWITCH))

PREFILL = Block(
    "Whether and how successors are prefilled while their precursors decode.",
    {
        "incremental": Switch("Prefill successors while precursors decode."),
        "chunk_tokens": Either(
            "New tokens per prefill-only update.",
            (Number("Fixed.", at_least=1, whole=True), Choice("Follows measured cost.", ("adaptive",))),
        ),
        "min_tokens": Number("Least chunk when adaptive.", at_least=1, whole=True),
        "max_tokens": Number("Largest chunk when adaptive.", at_least=1, whole=True),
        "busy_share": Number(
            "Share of time all growing prompts of a model may keep its prefill engine busy when adaptive.",
            above=0,
            at_most=1,
        ),
        "tail_share": Number(
            "A complete prompt is prefilled once more if more than this share of it is new.", at_least=0, at_most=1
        ),
        "slot_order": Choice(
            "'declared', or 'expected_finish' to put the precursor expected to end first in the first slot.",
            ("declared", "expected_finish"),
        ),
    },
)

ON_FAILURE = Choice(
    "A failed agent fails the request, or is dropped and its slot left out; a failed root always fails it.",
    ("fail", "drop"),
)

_ASKED: dict[str, Form] = {
    "prompt": PROMPT,
    "sampling": SAMPLING,
    "timeout_s": Number("Seconds the agent may take from its start to its end.", above=0, at_most=86_400),
}
_SHARED: dict[str, Form] = {**_ASKED, "on_failure": ON_FAILURE}

DEFAULTS = Block("What agents are given unless they say otherwise.", {"model": _models("As an agent's."), **_SHARED})

_ONE_MODEL = _models(
    "Model alias, from the deployment's configuration; a list of them, or `auto` for the deployment's, to have one "
    "chosen for each request."
)

AGENT = Block(
    "One agent.",
    {
        "model": _ONE_MODEL,
        "precursors": ListOf("Agents whose outputs it reads, in slot order.", name_form("Agent id.")),
        **_SHARED,
    },
    name="agent",
)

ROLE = Block("What the agents of this role are given.", _SHARED, name="role")

LAYERED_FIELDS: dict[str, Form] = {
    "shape": ListOf(
        "Agents per layer, leaves first; the last is 1.",
        Number("Agents in this layer.", at_least=1, at_most=MAX_AGENTS, whole=True),
        at_least=2,
        at_most=MAX_LAYERS,
    ),
    "models": ListOf(
        "Model aliases, or `auto`; the agents of each layer take turns.", _alias("Model alias."), at_least=1
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
        "precursors": ListOf("Earlier steps whose outputs it reads, in slot order.", name_form("Step id.")),
        **_ASKED,
        **STEP_FIELDS,
    },
    name="step",
)

GRAPH_FORMS = ("tree", "all_to_all", "agents", "steps")
"""Exactly one of these keys describes the graph."""

TOPOLOGY = Block(
    "A graph of agents that answers a question.",
    {
        "name": name_form("The name requests ask for; by default the file's name without its ending."),
        "description": Text("One line for people."),
        "tree": _layered("Every agent is read by one successor; layer sizes divide one another."),
        "all_to_all": _layered("Every agent reads all agents of the layer before."),
        "agents": MappingOf("The graph, agent by agent.", name_form("Agent id."), AGENT),
        "steps": MappingOf("Steps that run one after the other, chosen by rules.", name_form("Step id."), STEP),
        "start": START_RULES,
        "classifiers": MappingOf("What tells the class of a text, by name.", name_form("Classifier id."), CLASSIFIER),
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

DEFINITIONS = (PROMPT, SAMPLING, _EARLY_EXIT_FIELDS, AGENT, ROLE, CLUSTER, STEP, RULE, WHEN, CLASSIFIER)
"""The blocks that the JSON Schema refers to by name."""
