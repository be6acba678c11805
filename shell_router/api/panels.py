"""Topologies that requests bring: their own, or a panel of models and a judge (fusion)."""

from collections.abc import Mapping, Sequence
from typing import Any

from shell_router.api.fields import BRINGING
from shell_router.core.engine import ServedModel
from shell_router.core.validation import field_error
from shell_router.topology import INLINE
from shell_router.topology.prompting import AGGREGATOR

FUSIONS = frozenset({"fusion", "openrouter/fusion", "litellm/fusion-1"})
"""Names of models that stand for a panel; a topology or a model may have them, too."""
MAX_PANEL = 32
DEFAULT_PANEL = 8
PANEL = "fusion"


def read_brought(
    body: Mapping[str, Any], models: Mapping[str, ServedModel], *, fused: bool
) -> tuple[Mapping[str, Any], str]:
    """Return the document of the topology that a validated body brings, and its name in metrics.

    Args:
        body: The body, which has a field of BRINGING unless it is `fused`.
        models: The models that may be on a panel.
        fused: Whether the body's `model` stands for a panel.

    Raises:
        InvalidField: The body brings two topologies, or its panel cannot be.
    """
    name = body.get("model")
    brings = [field for field in body if field in BRINGING]
    if "topology" in brings:
        if fused or len(brings) > 1:
            raise field_error("topology", "goes without a panel of models", "Send one of the two.")
        return body["topology"], INLINE
    if len(brings) > 1:
        raise field_error(brings[1], f"describes a panel, as {brings[0]} does", "Describe it once.")
    if "fusion" in brings:
        return _panel(body["fusion"], "fusion.", name, models), PANEL
    if "plugins" in brings:
        plugins = body["plugins"]
        if len(plugins) != 1 or plugins[0].get("id") is None:
            raise field_error("plugins", "must be the fusion plugin alone", "Leave others out.")
        return _panel(plugins[0], "plugins[0].", name, models), PANEL
    return _panel(body, "", name, models), PANEL


def _panel(
    block: Mapping[str, Any], path: str, outer: object, served: Mapping[str, ServedModel]
) -> Mapping[str, Any]:
    """Return the topology: members answer the request as it is, and the judge reads their answers.

    `block` is the body itself where `path` is empty; `outer` is the body's model.
    """
    bases = [name for name, model in served.items() if model.base is None]
    members = _first_models(block, path, ("models", "analysis_models"), served)
    members = members or tuple(bases[:DEFAULT_PANEL])
    if len(members) > MAX_PANEL:
        raise field_error(
            f"{path}models", f"names {len(members)} models", f"Name at most {MAX_PANEL}."
        )
    judge_fields = ("judge", "synthesis_model", "model") if path else ("judge",)
    judges = _first_models(block, path, judge_fields, served)
    if not judges and isinstance(outer, str) and outer in served:
        judges = (outer,)
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
    agents: dict[str, Any] = {
        f"panel-{n}": {"model": model, **_member(block if path else {})}
        for n, model in enumerate(members, start=1)
    }
    cluster = {"agents": list(agents), "early_exit": early_exit}
    first, *others = dict.fromkeys((*judges, *members))
    judge: dict[str, Any] = {"model": first, "fallbacks": others[:16], "precursors": list(agents)}
    if criteria := _criteria(block, judge_fields):
        escaped = criteria.replace("{", "{{").replace("}", "}}")
        judge["prompt"] = {"prefix": f"{AGGREGATOR.prefix}\n\nJudge them by this: {escaped}"}
    return {"name": PANEL, "agents": {**agents, "judge": judge}, "clusters": {"panel": cluster}}


def _member(block: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {"temperature": "temperature", "max_completion_tokens": "max_new_tokens"}
    sampling = {native: block[name] for name, native in names.items() if name in block}
    if not sampling:
        return {"on_failure": "drop"}
    return {"on_failure": "drop", "sampling": sampling}


def _criteria(block: Mapping[str, Any], judges: Sequence[str]) -> str:
    judge = next((block[name] for name in judges if name in block), None)
    own = judge.get("criteria") if isinstance(judge, dict) else None
    return own or block.get("criteria") or ""


def _first_models(
    block: Mapping[str, Any], path: str, names: Sequence[str], served: Mapping[str, ServedModel]
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
    for at, model in enumerate(models):
        if model not in served:
            raise field_error(
                f"{where}[{at}]",
                f"is {model!r}, and no model is named so",
                f"Known: {', '.join(sorted(served))}.",
            )
    return models
