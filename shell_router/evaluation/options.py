"""What a user may say about an evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shell_router.core.grading import Grader
from shell_router.errors import ConfigError


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
    """Files that are written beside the tables, and the key of the data by which accuracy is told apart."""

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
