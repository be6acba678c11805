"""What is compared, each a name that the router serves, and the options of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from shell_router.batch.questions import Grader
from shell_router.errors import ConfigError, UnknownModel


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of `GET /v1/models`; `engine` names what serves a model, where the router has it."""

    name: str
    kind: Literal["model", "topology", "auto"]
    engine: str = ""


def chosen_settings(named: Sequence[str], served: Sequence[Setting]) -> list[Setting]:
    """The settings `named`, each once, or else all models and then all topologies. Raises UnknownModel."""
    known = {one.name: one for one in served}
    for name in named:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            remedy = f"It serves: {', '.join(known) or 'nothing'}."
            raise UnknownModel(f"The router serves no {name!r}.{hint}", remedy=remedy)
    every = [one for kind in ("model", "topology") for one in served if one.kind == kind]
    return [known[name] for name in dict.fromkeys(named)] or every


def baseline_of(settings: Sequence[Setting], named: str | None) -> Setting:
    """The setting that the others are compared with: the one named, the first topology, or the first."""
    if named is None:
        return next((one for one in settings if one.kind == "topology"), settings[0])
    for one in settings:
        if one.name == named:
            return one
    known = ", ".join(one.name for one in settings)
    raise ConfigError(f"the baseline {named!r} is not among the settings.", remedy=f"They are: {known}.")


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """One evaluation: a deployment that is started (`config`) or a router that runs (`url`), and what it is asked.

    `topologies` are files and folders that a deployment serves instead of its own. `api_key` is the running router's.
    `limit_s` is the longest that one request may take. Topologies get the `temperature` where it is given, other models
    0 where it is not, and `max_tokens`, where given. `json` gets the report, `records` a line per answer.
    """

    data: Path
    config: Path | None = None
    topologies: tuple[Path, ...] = ()
    url: str | None = None
    api_key: str | None = None
    settings: tuple[str, ...] = ()
    baseline: str | None = None
    grader: Grader | Literal["auto"] = "auto"
    offset: int = 0
    limit: int | None = None
    seeds: tuple[int, ...] = (0,)
    concurrency: int = 1
    limit_s: float = 900.0
    temperature: float | None = None
    max_tokens: int | None = None
    json: Path | None = None
    records: Path | None = None

    def __post_init__(self) -> None:
        if (self.config is None) == (self.url is None):
            raise ConfigError("an evaluation needs a config or a url, and not both.")
        if self.config is not None and self.api_key is not None:
            raise ConfigError(
                "a deployment that is started for an evaluation takes no key.", remedy="Leave out --api-key-env."
            )
        if self.limit_s <= 0:
            raise ConfigError(f"a request's limit must be above 0 s, not {self.limit_s:g}.")
        if not self.seeds:
            raise ConfigError("seeds is empty.", remedy="Name at least one, as in --seeds 0.")
