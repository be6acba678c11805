"""Every key of a topology file, for the reader and for the editors' JSON Schema.

Keys of agents, prompts, prefill and early exit are the described fields of their classes; this
table adds the keys that only files have.
"""

# mypy: disable-error-code="valid-type, misc"
# The table makes types at run time, from the fields of those classes.

from dataclasses import fields
from typing import Annotated, Any, Literal, Required, get_type_hints

from annotated_types import Interval, Len
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from shell_router.core.budget import Budget
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.sampling import RANGES
from shell_router.core.validation import Array
from shell_router.early_exit.settings import EarlyExit
from shell_router.files.schema import Schema, annotation_text, class_text, json_schema
from shell_router.files.types import DISTINCT, Index, ModelName, Name, Switch
from shell_router.topology.graph import Agent, FanOut, Prefill
from shell_router.topology.prompting import Prompt
from shell_router.topology.rules import SUBJECTS

MAX_AGENTS = 1024
MAX_LAYERS = 32
MAX_STEPS = 100
MAX_RULES = 100
MAX_EXAMPLES = 1000

GRAPH_FORMS = ("tree", "all_to_all", "agents", "steps")
"""Exactly one of these keys describes the graph."""


def list_described_fields(kind: type) -> NewValues:
    """Return the annotations of a dataclass's described fields, by name."""
    hints = get_type_hints(kind, include_extras=True)
    names = [each.name for each in fields(kind)]
    return {name: hints[name] for name in names if annotation_text(hints[name])}


def _block(
    name: str,
    about: str,
    keys: Values,
    *,
    required: tuple[str, ...] = (),
    extra: Literal["allow", "forbid"] = "forbid",
) -> Any:
    """Make the type of a mapping with these keys, which holds only the keys that a file has."""
    hints = {key: Required[hint] if key in required else hint for key, hint in keys.items()}
    make: Any = TypedDict
    block = make(name, hints, total=False)
    block.__doc__ = about
    block.__pydantic_config__ = ConfigDict(extra=extra)
    return block


def _text(title: str) -> Any:
    """Text that is not blank."""
    return Annotated[str, Field(pattern=r"\S", title=title)]


ALIAS = _text("a model alias")
MODELS = ALIAS | Annotated[Array[ALIAS], Len(1, MAX_AGENTS), DISTINCT]
WORDS = str | Annotated[Array[str], Len(1)]
MODEL = Annotated[
    MODELS,
    "Model alias; a list of them, or `auto` for the deployment's, of which one is chosen.",
]
VOTE = Annotated[
    Literal["majority", "confidence", "judge"],
    "Asks no model: forwards the output whose stated answer most precursors share; with"
    " 'confidence' each counts by its mean token probability; with 'judge' the last precursor"
    " writes the number of the output.",
]

PROMPT = _block("prompt", class_text(Prompt), list_described_fields(Prompt))

SAMPLING = _block(
    "sampling",
    "SGLang's sampling parameters. Other names are sent to the engine unchanged.",
    {
        "temperature": Annotated[float, RANGES["temperature"], "0 decodes greedily."],
        "top_p": Annotated[float, RANGES["top_p"], "Nucleus sampling."],
        "top_k": Annotated[
            int, RANGES["top_k"], "Sample from the k likeliest tokens; -1 from all."
        ],
        "min_p": Annotated[
            float, RANGES["min_p"], "Least probability relative to the likeliest token's."
        ],
        "max_new_tokens": Annotated[int, RANGES["max_new_tokens"], "Most tokens to decode."],
        "min_new_tokens": Annotated[int, RANGES["min_new_tokens"], "Fewest tokens to decode."],
        "frequency_penalty": Annotated[
            float, RANGES["frequency_penalty"], "Penalty per earlier occurrence."
        ],
        "presence_penalty": Annotated[
            float, RANGES["presence_penalty"], "Penalty for having occurred."
        ],
        "repetition_penalty": Annotated[
            float, RANGES["repetition_penalty"], "Above 1 discourages repetition."
        ],
        "stop": Annotated[str | Array[str], "Text at which decoding stops."],
        "stop_token_ids": Annotated[Array[Index], "Tokens at which decoding stops."],
        "n": Annotated[Literal[1], "An agent has one output; add agents for more."],
    },
    extra="allow",
)

SHARED = {
    **list_described_fields(Agent),
    "prompt": PROMPT,
    "sampling": SAMPLING,
}
"""Keys of agents that roles, defaults and steps have too."""
OF_STEPS = {key: hint for key, hint in SHARED.items() if key not in ("on_failure", "tools")}

EARLY_EXIT_BLOCK = _block("early_exit", class_text(EarlyExit), list_described_fields(EarlyExit))
EARLY_EXIT = Annotated[
    EARLY_EXIT_BLOCK | Switch,
    "Settings; `on` for the topology's settings or the defaults; `off` lets all agents finish.",
]

DEFAULTS = _block(
    "defaults",
    "What agents are given unless they say otherwise.",
    {"model": Annotated[MODELS, "As an agent's."], **SHARED},
)

RESERVE = Annotated[
    float,
    Interval(ge=1, le=86_400),
    "Seconds before the request's deadline that are kept for the root.",
]

FALLBACKS = Annotated[
    Array[ALIAS],
    Len(0, 16),
    "Models that take its place in turn if its model fails before its first token.",
]

AGENT = _block(
    "agent",
    "One agent.",
    {
        "model": MODEL,
        "fallbacks": FALLBACKS,
        "vote": VOTE,
        "precursors": Annotated[
            Array[Name], DISTINCT, "Agents whose outputs it reads, in slot order."
        ],
        **SHARED,
    },
)

ROLE = _block("role", "What the agents of this role are given.", {"vote": VOTE, **SHARED})

_LAYER = Annotated[int, Interval(ge=1, le=MAX_AGENTS)]
LAYERED = _block(
    "tree",
    "Layers of agents.",
    {
        "shape": Annotated[
            Array[_LAYER], Len(2, MAX_LAYERS), "Agents per layer, leaves first; the last is 1."
        ],
        "models": Annotated[
            Array[ALIAS], Len(1), "Model aliases, or `auto`; the agents of each layer take turns."
        ],
        "root_model": Annotated[
            ALIAS, "The root's model alias, or `auto`; by default the last of `models`."
        ],
        "proposer": ROLE,
        "aggregator": ROLE,
        "root": ROLE,
    },
    required=("shape", "models"),
)

CLUSTER = _block(
    "cluster",
    "Agents that are judged together.",
    {"agents": Annotated[Array[Name], Len(1), "Members."], "early_exit": EARLY_EXIT},
    required=("agents",),
)

WHEN = _block(
    "when",
    "What has to hold, all of it.",
    {
        "label": Annotated[
            dict[_text("a label"), WORDS],
            Len(1),
            "Values that labels of the request must have; of several values one.",
        ],
        "matches": Annotated[
            str,
            Field(min_length=1, title="a regular expression"),
            "Regular expression (RE2) that the text holds somewhere.",
        ],
        "classifier": Annotated[Name, "The classifier of the text; `is` names the classes."],
        "is": Annotated[
            WORDS, "The class that the text must have, or several of which one will do."
        ],
        "confidence_below": Annotated[
            float,
            Interval(gt=0, le=1),
            "Holds when the step's output has a lower geometric mean token probability.",
        ],
        "score_below": Annotated[
            dict[ALIAS, Annotated[float, Interval(gt=0, le=1)]],
            Len(1),
            "Holds when the trained router gives each of these models a lower chance of "
            "being right.",
        ],
        "of": Annotated[
            Literal[SUBJECTS],
            "Which text is meant; the request at the start, else the step's output.",
        ],
    },
)

RULE = _block(
    "rule",
    "Leads to a step, or to the end, when something holds; without `when` always.",
    {"when": WHEN, "go": Annotated[Name, "A step's id, or `end`."]},
    required=("go",),
)
RULES = Name | Annotated[list[RULE], Len(1, MAX_RULES)]

STEP = _block(
    "step",
    "One step: an agent, or with `topology` a whole topology.",
    {
        "model": MODEL,
        "fallbacks": FALLBACKS,
        "precursors": Annotated[
            Array[Name], DISTINCT, "Earlier steps whose outputs it reads, in slot order."
        ],
        **OF_STEPS,
        "topology": Annotated[ModelName, "A topology's name: the step asks all of it."],
        "then": Annotated[
            RULES,
            "The next step's id, or rules, of which the first that holds is taken; by "
            "default `end`.",
        ],
        "answer": Annotated[
            Name, "An earlier step, whose output is the answer if the request ends here."
        ],
        "on_failure": Annotated[
            Name,
            "The step that follows if this one fails, or with `answer` also `end`; by default the "
            "request fails.",
        ],
    },
)

CLASSIFIER = _block(
    "classifier",
    "Classifies a text as its most similar example.",
    {
        "examples": Annotated[
            dict[_text("a class"), Annotated[Array[_text("a text")], Len(1, MAX_EXAMPLES)]],
            Len(1),
            "Texts by class.",
        ],
        "min_similarity": Annotated[
            float,
            Interval(ge=-1, le=1),
            "Least cosine similarity to the nearest example; else a text has no class.",
        ],
    },
    required=("examples",),
)

TOPOLOGY_NAME = Annotated[
    ModelName, "The name requests ask for; by default the file's name without its ending."
]

TOPOLOGY = _block(
    "topology",
    "A graph of agents that answers a question.",
    {
        "name": TOPOLOGY_NAME,
        "description": Annotated[str, "One line for people."],
        "tree": Annotated[
            LAYERED, "Every agent is read by one successor; layer sizes divide one another."
        ],
        "all_to_all": Annotated[LAYERED, "Every agent reads all agents of the layer before."],
        "agents": Annotated[dict[Name, AGENT], Len(1), "The graph, agent by agent."],
        "steps": Annotated[
            dict[Name, STEP], Len(1), "Steps that run one after the other, chosen by rules."
        ],
        "start": Annotated[
            RULES, "The first step's id, or rules, of which the first that holds is taken."
        ],
        "classifiers": Annotated[dict[Name, CLASSIFIER], Len(1), "Classifiers of texts, by name."],
        "clusters": Annotated[
            dict[Name, CLUSTER],
            Len(1),
            "Which agents are judged together; by default those with the same successors.",
        ],
        "early_exit": EARLY_EXIT,
        "prefill": _block("prefill", class_text(Prefill), list_described_fields(Prefill)),
        "defaults": DEFAULTS,
        "on_failure": SHARED["on_failure"],
        "root_reserve_s": RESERVE,
        "budget": _block("budget", class_text(Budget), list_described_fields(Budget)),
        "fan_out": Annotated[
            FanOut,
            "'turn' runs the agents below the root once for each user message and keeps their "
            "outputs while the root calls tools; 'request' runs them in every request.",
        ],
    },
)


def topology_schema() -> Schema:
    """Write the JSON Schema of a topology file: keys, kinds and bounds, but not the graph."""
    schema = json_schema(TOPOLOGY, "Shell router topology")
    return {**schema, "oneOf": [{"required": [form]} for form in GRAPH_FORMS]}
