"""What requests bring to be run: a topology of their own, or a panel of models and a judge (fusion)."""

from collections.abc import Container, Mapping
from typing import Any

from shell_router.api.fields import Fields, as_object, shown
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


def brought_by(body: Fields, models: Mapping[str, ServedModel], served: Container[str]) -> Brought | None:
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
    return _Panel(block, body, models).document(), PANEL


def _plugin(body: Fields) -> Fields:
    """The one entry of OpenRouter's `plugins`."""
    plugins = body.listed("plugins") or []
    if len(plugins) != 1:
        raise body.refuse("plugins", f"has {len(plugins)} entries", "Send the fusion plugin alone.")
    plugin = as_object(plugins[0], "plugins[0]")
    if plugin.raw("id") != "fusion" or plugin.raw("enabled") is False:
        raise plugin.refuse("id", "must be fusion, and the plugin enabled", "Leave other plugins out.")
    return plugin


class _Panel:
    """Reads a panel. Its fields have several names: ours, and those of OpenRouter, LiteLLM and Merge."""

    def __init__(self, block: Fields, body: Fields, models: Mapping[str, ServedModel]) -> None:
        self._block = block
        self._known = models
        self._own = block is not body
        bases = [name for name, model in models.items() if model.base is None]
        self._models = self._named("models", "analysis_models") or tuple(bases[:DEFAULT_PANEL])
        if len(self._models) > MAX_PANEL:
            raise block.refuse("models", f"names {len(self._models)} models", f"Name at most {MAX_PANEL}.")
        outer = body.raw("model")
        self._judges = self._judge() or ((outer,) if isinstance(outer, str) and outer in models else ())
        self._judges = tuple(dict.fromkeys((*self._judges, *self._models)))
        self._criteria = self._criteria_of_judge or block.text("criteria") or ""
        self._quorum = block.integer("quorum", 1, len(self._models)) or len(self._models)
        self._grace_s = block.number("grace_s", 0, 86_400) or 0.0
        self._sampling: dict[str, Any] = {}
        if self._own:
            self._sampling = {
                "temperature": block.number("temperature", 0, 2),
                "max_new_tokens": block.integer("max_completion_tokens", 1, 2**31 - 1),
            }
            if unread := block.unread:
                raise block.refuse(unread[0], "is not served", f"Leave {unread[0]} out.")

    def document(self) -> Mapping[str, Any]:
        """The topology: members answer the request as it is, and the judge reads their answers."""
        sampling = {name: said for name, said in self._sampling.items() if said is not None}
        asked = {"on_failure": "drop", **({"sampling": sampling} if sampling else {})}
        agents: dict[str, Any] = {
            f"panel-{n}": {"model": model, **asked} for n, model in enumerate(self._models, start=1)
        }
        first, *others = self._judges
        judge: dict[str, Any] = {"model": first, "fallbacks": others[:16], "precursors": list(agents)}
        if self._criteria:
            wanted = self._criteria.replace("{", "{{").replace("}", "}}")
            judge["prompt"] = {"prefix": f"{AGGREGATOR.prefix}\n\nJudge them by this: {wanted}"}
        exits = {"policy": "quorum", "min_completed": self._quorum, "grace_s": self._grace_s}
        return {
            "name": PANEL,
            "agents": {**agents, "judge": judge},
            "clusters": {"panel": {"agents": list(agents), "early_exit": exits}},
        }

    def _judge(self) -> tuple[str, ...]:
        """The judges in order; an object names one and its criteria, as LiteLLM's."""
        self._criteria_of_judge = ""
        names = ("judge", "synthesis_model", *(("model",) if self._own else ()))
        given = [name for name in names if self._block.raw(name) is not None]
        if not given:
            return ()
        if isinstance(self._block.raw(given[0]), dict):
            judge = as_object(self._block.raw(given[0]), self._block.path(given[0]))
            self._criteria_of_judge = judge.text("criteria") or ""
            found = self._checked(judge, "model", judge.names("model"))
            if unread := judge.unread:
                raise judge.refuse(unread[0], "is not served", f"Leave {unread[0]} out.")
            return found
        return self._named(*given[:1])

    def _named(self, *names: str) -> tuple[str, ...]:
        """The models that the first field of these that is set names."""
        for name in self._block.given(names):
            value = self._block.raw(name)
            listed = [value] if isinstance(value, str) else value
            if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
                raise self._block.refuse(name, f"must be names of models, not {shown(value)}")
            return self._checked(self._block, name, tuple(listed))
        return ()

    def _checked(self, where: Fields, name: str, models: tuple[str, ...]) -> tuple[str, ...]:
        for at, model in enumerate(models):
            if model not in self._known:
                path = f"{where.path(name)}[{at}]"
                known = ", ".join(sorted(self._known))
                raise InvalidField(f"{path}: no model is named {model!r}.", field=path, remedy=f"Known: {known}.")
        return models
