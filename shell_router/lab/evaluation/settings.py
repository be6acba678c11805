"""What is compared (a name that the router serves, or a vote of plain models), and the options of an evaluation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from shell_router.batch.questions import Grader
from shell_router.errors import ConfigError, UnknownModel

VOTE = "vote:"
DEFAULT_VOTES = 3
_MEMBERS = re.compile(r"(?P<model>.+?)(?:\*(?P<times>[1-9]\d{0,2}))?")


@dataclass(frozen=True, slots=True)
class Served:
    """One entry of `GET /v1/models`; `engine` names what serves a model, where the router has it.

    An `auto` is asked as a model is; it has to be named, and cannot vote.
    """

    name: str
    kind: Literal["model", "topology", "auto"]
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing compared. `members` are the names asked for one answer: the one itself, or those that vote."""

    name: str
    kind: Literal["model", "topology", "auto", "vote"]
    members: tuple[str, ...]


def chosen_settings(named: Sequence[str], served: Sequence[Served]) -> list[Setting]:
    """The settings `named`, each once, or else all that the router serves. Raises UnknownModel and ConfigError."""
    kinds = {one.name: one.kind for one in served}
    names = list(dict.fromkeys(named)) or _all(served)
    return [_setting(name, kinds) for name in names]


def baseline_of(settings: Sequence[Setting], named: str | None) -> Setting:
    """The setting that the others are compared with: the one named, the first topology, or the first."""
    if named is None:
        return next((one for one in settings if one.kind == "topology"), settings[0])
    for one in settings:
        if one.name == named:
            return one
    known = ", ".join(one.name for one in settings)
    raise ConfigError(f"the baseline {named!r} is not among the settings.", remedy=f"They are: {known}.")


def _all(served: Sequence[Served]) -> list[str]:
    """Plain models, a vote of them where there are several, and topologies."""
    models = [one.name for one in served if one.kind == "model"]
    vote = VOTE + ",".join(f"{name}*{DEFAULT_VOTES}" for name in models)
    return [*models, *([vote] if len(models) > 1 else []), *(one.name for one in served if one.kind == "topology")]


def _setting(name: str, kinds: Mapping[str, Literal["model", "topology", "auto"]]) -> Setting:
    if name in kinds:
        return Setting(name, kinds[name], (name,))
    if name.startswith(VOTE):
        return Setting(name, "vote", _members(name, kinds))
    raise _unknown(name, kinds)


def _members(name: str, kinds: Mapping[str, Literal["model", "topology", "auto"]]) -> tuple[str, ...]:
    members: list[str] = []
    for part in name.removeprefix(VOTE).split(","):
        found = _MEMBERS.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"{name!r} names no members.", remedy=f"Write them as in {VOTE}small*3,large.")
        if kinds.get(found["model"]) != "model":
            raise _unknown(found["model"], {one: kind for one, kind in kinds.items() if kind == "model"})
        members += [found["model"]] * int(found["times"] or 1)
    return tuple(members)


def _unknown(name: str, kinds: Mapping[str, str]) -> UnknownModel:
    close = get_close_matches(name, kinds, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UnknownModel(f"The router serves no {name!r}.{hint}", remedy=f"It serves: {', '.join(kinds) or 'nothing'}.")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Request-level sampling. What is None is not sent.

    `temperature` goes to topologies only where it is given, and plain models are asked with 0 where it is not; votes
    have `vote_temperature` and top_p 0.95. `max_tokens` is for plain models and votes.
    """

    temperature: float | None = None
    vote_temperature: float = 0.7
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Reports:
    """Files that are written, and the key of the data by whose values accuracy is split."""

    json: Path | None = None
    records: Path | None = None
    picture: Path | None = None
    by: str | None = None


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """One evaluation: a deployment that is started (`config`) or a router that runs (`url`), and what it is asked.

    `topologies` are files and folders that a deployment serves instead of its own. `api_key` is the running router's.
    `limit_s` is the longest that one request may take.
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
    sampling: Sampling = Sampling()
    reports: Reports = Reports()

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
