"""What requests bring to be run: a topology of their own, or a panel of models and a judge
(fusion).
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from shell_router.api.fields import MAX_TOKENS, Fields, as_object, shown
from shell_router.core.engine import ServedModel
from shell_router.errors import InvalidField
from shell_router.topology import INLINE
from shell_router.topology.prompting import AGGREGATOR

FUSIONS = frozenset({"fusion", "openrouter/fusion", "litellm/fusion-1"})
"""Names of models that stand for a panel; a topology or a model may have them, too."""
BRINGING = frozenset({"topology", "fusion", "judge", "plugins"})
"""Fields with which a request may bring something."""
PANEL_FIELDS = frozenset({"models", "quorum", "grace_s", "criteria"})
"""Fields that describe a panel, as `judge` does."""
MAX_PANEL = 32
DEFAULT_PANEL = 8
PANEL = "fusion"

Brought = tuple[Mapping[str, Any], str]
"""A topology inside of a request: its document, and what metrics and traces call it."""


def brought_by(
    body: Fields, models: Mapping[str, ServedModel], served: Container[str]
) -> Brought | None:
    """What the body brings; None where its `model` says what to run. `models` may be on a panel.

    A name of FUSIONS that is `served` is what is served under it. Raises InvalidField.
    """
    name = body.raw("model")
    fused = isinstance(name, str) and name in FUSIONS and name not in served
    given = body.given(BRINGING)
    if not (fused or given):
        return None
    if "topology" in given:
        if fused or len(given) > 1:
            raise body.refuse("topology", "goes without a panel of models", "Send one of the two.")
        body.object("topology")
        return body.raw("topology"), INLINE
    if len(given) > 1:
        raise body.refuse(given[1], f"describes a panel, as {given[0]} does", "Describe it once.")
    block = body.object("fusion") or (_plugin(body) if "plugins" in given else body)
    return _document(block, body, models), PANEL


def _plugin(body: Fields) -> Fields:
    """The one entry of OpenRouter's `plugins`."""
    plugins = body.listed("plugins") or []
    if len(plugins) != 1:
        raise body.refuse("plugins", f"has {len(plugins)} entries", "Send the fusion plugin alone.")
    plugin = as_object(plugins[0], "plugins[0]")
    if plugin.raw("id") != "fusion" or plugin.raw("enabled") is False:
        raise plugin.refuse(
            "id", "must be fusion, and the plugin enabled", "Leave other plugins out."
        )
    return plugin


def _document(block: Fields, body: Fields, known: Mapping[str, ServedModel]) -> Mapping[str, Any]:
    """The topology: members answer the request as it is, and the judge reads their answers.

    A panel's fields have several names: ours, and those of OpenRouter, LiteLLM and Merge.
    """
    bases = [name for name, model in known.items() if model.base is None]
    members = _named(block, ("models", "analysis_models"), known) or tuple(bases[:DEFAULT_PANEL])
    if len(members) > MAX_PANEL:
        raise block.refuse("models", f"names {len(members)} models", f"Name at most {MAX_PANEL}.")
    is_own = block is not body
    outer = body.raw("model")
    judges, criteria = _judges(
        block, ("judge", "synthesis_model", *(("model",) if is_own else ())), known
    )
    judges = judges or ((outer,) if isinstance(outer, str) and outer in known else ())
    criteria = criteria or block.text("criteria") or ""
    quorum = block.integer("quorum", 1, len(members)) or len(members)
    exits = {
        "policy": "quorum",
        "min_completed": quorum,
        "grace_s": block.number("grace_s", 0, 86_400) or 0.0,
    }
    asked: dict[str, Any] = {"on_failure": "drop"}
    if is_own:
        tokens = block.integer("max_completion_tokens", 1, MAX_TOKENS)
        sampling = {"temperature": block.number("temperature", 0, 2), "max_new_tokens": tokens}
        if sampling := {name: said for name, said in sampling.items() if said is not None}:
            asked["sampling"] = sampling
        _refuse_unread(block)
    agents: dict[str, Any] = {
        f"panel-{n}": {"model": model, **asked} for n, model in enumerate(members, start=1)
    }
    first, *others = dict.fromkeys((*judges, *members))
    judge: dict[str, Any] = {"model": first, "fallbacks": others[:16], "precursors": list(agents)}
    if criteria:
        wanted = criteria.replace("{", "{{").replace("}", "}}")
        judge["prompt"] = {"prefix": f"{AGGREGATOR.prefix}\n\nJudge them by this: {wanted}"}
    clusters = {"panel": {"agents": list(agents), "early_exit": exits}}
    return {"name": PANEL, "agents": {**agents, "judge": judge}, "clusters": clusters}


def _judges(
    block: Fields, names: Sequence[str], known: Mapping[str, ServedModel]
) -> tuple[tuple[str, ...], str]:
    """The judges in order, and criteria; an object names one judge and its criteria, as
    LiteLLM's."""
    given = [name for name in names if block.raw(name) is not None]
    if not given or not isinstance(block.raw(given[0]), dict):
        return _named(block, given[:1], known), ""
    name = given[0]
    judge = as_object(block.raw(name), block.path(name))
    criteria = judge.text("criteria") or ""
    models = _known(judge, "model", judge.names("model"), known)
    _refuse_unread(judge)
    return models, criteria


def _named(
    block: Fields, names: Sequence[str], known: Mapping[str, ServedModel]
) -> tuple[str, ...]:
    """The models that the first field of these that is set names."""
    for name in block.given(names):
        value = block.raw(name)
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise block.refuse(name, f"must be names of models, not {shown(value)}")
        return _known(block, name, tuple(listed), known)
    return ()


def _known(
    where: Fields, name: str, models: tuple[str, ...], known: Mapping[str, ServedModel]
) -> tuple[str, ...]:
    for at, model in enumerate(models):
        if model not in known:
            path = f"{where.path(name)}[{at}]"
            served = ", ".join(sorted(known))
            raise InvalidField(
                f"{path}: no model is named {model!r}.", field=path, remedy=f"Known: {served}."
            )
    return models


def _refuse_unread(block: Fields) -> None:
    if unread := block.unread:
        raise block.refuse(unread[0], "is not served", f"Leave {unread[0]} out.")
