"""The short forms: a tree (Faster-MoA, 4.1) and its all-to-all counterpart, written out agent by agent."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Values = Mapping[str, Any]


def merged(base: Values, own: Values) -> dict[str, Any]:
    """`own` over `base`; prompts and sampling parameters are merged key by key."""
    blocks = {key: {**base[key], **own[key]} for key in ("prompt", "sampling") if key in base and key in own}
    return {**base, **own, **blocks}


def write_out(form: Literal["tree", "all_to_all"], layered: Values) -> dict[str, dict[str, Any]]:
    """Agents of a checked short form, as the full form's `agents` would hold them, leaves first.

    In a layer the agents take turns through `models`, so that a cluster of a 9-3-1 tree over three models holds
    each of them once; the root has the last, or `root_model`.
    """
    layers = agent_ids(layered["shape"])
    agents: dict[str, dict[str, Any]] = {}
    for depth, layer in enumerate(layers):
        below = layers[depth - 1] if depth else []
        width = len(below) // len(layer) if form == "tree" else 0
        role = _role(layered, depth, len(layers))
        for position, agent in enumerate(layer):
            mine = below[position * width : (position + 1) * width] if width else below
            model = _model(layered, position, is_root=depth == len(layers) - 1)
            agents[agent] = {**role, "model": model, "precursors": list(mine)}
    return agents


def agent_ids(shape: Sequence[int]) -> list[list[str]]:
    """Ids per layer, leaves first: proposer-1, ..., aggregator-1, ..., root.

    With several layers of aggregators the layer's number joins in: aggregator2-1, ..., aggregator3-1.
    """
    several = len(shape) > 3
    layers = [[f"proposer-{n}" for n in range(1, shape[0] + 1)]]
    for depth, size in enumerate(shape[1:-1], start=2):
        stem = f"aggregator{depth}" if several else "aggregator"
        layers.append([f"{stem}-{n}" for n in range(1, size + 1)])
    return [*layers, ["root"]]


def _role(layered: Values, depth: int, layers: int) -> dict[str, Any]:
    if depth == 0:
        return dict(layered.get("proposer", {}))
    aggregator = dict(layered.get("aggregator", {}))
    return merged(aggregator, layered.get("root", {})) if depth == layers - 1 else aggregator


def _model(layered: Values, position: int, *, is_root: bool) -> str:
    models: Sequence[str] = layered["models"]
    if is_root:
        return str(layered.get("root_model", models[-1]))
    return models[position % len(models)]
