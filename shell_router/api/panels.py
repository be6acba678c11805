"""Topologies that requests bring: their own, or a panel of models and a judge (fusion)."""

from collections.abc import Mapping, Sequence

from shell_router.api.bodies import read_sampling
from shell_router.api.fields import BRINGING
from shell_router.core.engine import ServedModel
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.validation import field_error
from shell_router.topology import INLINE
from shell_router.topology.prompting import AGGREGATOR

FUSIONS = frozenset({"fusion", "openrouter/fusion", "litellm/fusion-1"})
"""Names of models that stand for a panel; a topology or a model may have them, too."""
MAX_PANEL = 32
DEFAULT_PANEL = 8
PANEL = "fusion"


def list_brought(body: Values) -> list[str]:
    """Return the fields of a validated body that bring a topology or a panel.

    An empty `plugins` brings nothing.
    """
    fields = [name for name in body if name in BRINGING and (name != "plugins" or body[name])]
    if not fields and "models" in body:
        return ["models"]
    return fields


def read_brought(
    body: Values, models: Mapping[str, ServedModel], *, fused: bool
) -> tuple[Values, str]:
    """Return the document of the topology that a validated body brings, and its name in metrics.

    Args:
        body: The body, of which `list_brought` names fields unless it is `fused`.
        models: The models that may be on a panel.
        fused: Whether the body's `model` stands for a panel.

    Raises:
        InvalidField: The body brings two topologies, or its panel cannot be.
    """
    brings = list_brought(body)
    if "topology" in brings:
        if fused or len(brings) > 1:
            raise field_error("topology", "goes without a panel of models", "Send one of the two.")
        return body["topology"], INLINE
    if len(brings) > 1:
        raise field_error(brings[1], f"describes a panel, as {brings[0]} does", "Describe it once.")
    block = body
    path = ""
    if "fusion" in brings:
        block = body["fusion"]
        path = "fusion."
    elif "plugins" in brings:
        block, *others = body["plugins"]
        path = "plugins[0]."
        if others or block.get("id") is None:
            raise field_error("plugins", "must be the fusion plugin alone", "Leave others out.")
    limit = read_sampling(body).get("max_new_tokens")
    outer = body.get("model", ())
    return _panel(block, path, outer=outer, limit=limit, served=models, fused=fused), PANEL


def _panel(
    block: Values,
    path: str,
    *,
    outer: str | Sequence[str],
    limit: int | None,
    served: Mapping[str, ServedModel],
    fused: bool,
) -> Values:
    """Return the topology: members answer the request as it is, and the judge reads their answers.

    Args:
        block: The panel's fields; the body itself where `path` is empty.
        path: The block's path in the body.
        outer: The body's model or models. They are the members if only a judge is named, and the
            judges if only members are.
        limit: The most tokens of a member, unless the block has a limit.
        served: The models that may be on the panel.
        fused: Whether `outer` stands for a panel.
    """
    judge_fields = ("judge", "synthesis_model", "model") if path else ("judge",)
    judges = _first_models(block, path, judge_fields, served)
    members = _first_models(block, path, ("models", "analysis_models"), served)
    if members:
        named = [outer] if isinstance(outer, str) else outer
        judges = judges or tuple(name for name in named if name in served)
    elif fused:
        members = tuple(name for name, model in served.items() if model.base is None)
        members = members[:DEFAULT_PANEL]
    elif judges and outer:
        members = _first_models({"model": outer}, "", ("model",), served)
    if not members:
        remedy = f"Name its members, or set model to {PANEL} alone to ask the first of all models."
        raise field_error(f"{path}models", "is missing", remedy)
    if len(members) > MAX_PANEL:
        raise field_error(
            f"{path}models", f"names {len(members)} models", f"Name at most {MAX_PANEL}."
        )
    quorum = block.get("quorum") or len(members)
    if quorum > len(members):
        raise field_error(
            f"{path}quorum", f"must be from 1 to {len(members)}, the models of the panel"
        )
    early_exit = {
        "policy": "quorum",
        "min_completed": quorum,
        "grace_s": block.get("grace_s") or 0.0,
    }
    agents: NewValues = {
        f"panel-{n}": {"model": model, **_member(block if path else {}, limit)}
        for n, model in enumerate(members, start=1)
    }
    cluster = {"agents": list(agents), "early_exit": early_exit}
    first, *others = dict.fromkeys((*judges, *members))
    judge: NewValues = {"model": first, "fallbacks": others[:16], "precursors": list(agents)}
    if criteria := _criteria(block, judge_fields):
        escaped = criteria.replace("{", "{{").replace("}", "}}")
        judge["prompt"] = {"prefix": f"{AGGREGATOR.prefix}\n\nJudge them by this: {escaped}"}
    panel = {"name": PANEL, "agents": {**agents, "judge": judge}, "clusters": {"panel": cluster}}
    return panel | {name: block[name] for name in ("root_reserve_s",) if block.get(name)}


def _member(block: Values, limit: int | None) -> Values:
    """Return the keys of a member; `limit` holds where the block has none."""
    sampling = {} if limit is None else {"max_new_tokens": limit}
    names = {"temperature": "temperature", "max_completion_tokens": "max_new_tokens"}
    sampling |= {native: block[name] for name, native in names.items() if name in block}
    return {"on_failure": "drop", "sampling": sampling}


def _criteria(block: Values, judges: Sequence[str]) -> str:
    judge = next((block[name] for name in judges if name in block), None)
    own = judge.get("criteria") if isinstance(judge, dict) else None
    return own or block.get("criteria") or ""


def _first_models(
    block: Values, path: str, names: Sequence[str], served: Mapping[str, ServedModel]
) -> tuple[str, ...]:
    """Return the models in the first of these fields that is set; raises InvalidField."""
    name = next((name for name in names if name in block), None)
    if name is None:
        return ()
    value = block[name]
    where = f"{path}{name}"
    if isinstance(value, dict):
        value = value["model"]
        where += ".model"
    models = (value,) if isinstance(value, str) else tuple(value)
    if not models:
        raise field_error(where, "is empty", "Name a model, or leave it out.")
    for at, model in enumerate(models):
        if model not in served:
            known = ", ".join(sorted(served))
            what = f"is {model!r}, and no model is named so"
            raise field_error(f"{where}[{at}]", what, f"Known: {known}.")
    return models
