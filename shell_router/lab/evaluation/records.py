"""One record per question, seed and setting: read from a router's answer and trace, and back from a file of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from shell_router.errors import ConfigError, DataError
from shell_router.lab.evaluation.dataset import read_items
from shell_router.prediction.scores import Graded


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One agent of one answer. `layer` counts from the leaves (0); `state` is the trace's word.

    It is `started` once its complete prompt was sent to its engine. `completion_tokens` are those that it wrote, also
    when it was cut off; the other counts are 0 unless it finished.
    """

    agent: str
    model: str
    layer: int
    state: str
    started: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """One judgement of a cluster by the early-exit gate, and how long it took."""

    cluster: str
    layer: int
    exited: bool
    duration_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """One question with one seed in one setting.

    `stated` is the answer that the text states, as far as the grader understands it. `latency_s` is what the client
    waited. A failed request has only an `error`.
    """

    question: int
    seed: int
    setting: str
    right: bool
    stated: str | None
    latency_s: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    agents: Sequence[AgentRecord] = ()
    exits: Sequence[ExitRecord] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One request's answer. `latency_s` is from sending to the answer's end."""

    text: str
    latency_s: float
    prompt_tokens: int
    completion_tokens: int
    agents: tuple[AgentRecord, ...]
    exits: tuple[ExitRecord, ...]
    trace: Mapping[str, Any]


def read_reply(completion: Mapping[str, Any], trace: Mapping[str, Any], latency_s: float) -> Reply:
    """A chat completion and its trace, both as docs/reference/api.md has them."""
    usage = completion["usage"]
    layers = layers_of({agent: found.get("precursors", ()) for agent, found in trace["agents"].items()})
    return Reply(
        completion["choices"][0]["message"]["content"] or "",
        latency_s,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        tuple(_agent(agent, found, layers[agent]) for agent, found in trace["agents"].items()),
        tuple(_exit(found, layers) for found in trace["exits"]),
        trace,
    )


def layers_of(precursors: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Per agent its longest distance from a leaf, by the agents that each one reads."""

    @cache
    def layer(agent: str) -> int:
        return 1 + max((layer(one) for one in precursors[agent] if one in precursors), default=-1)

    return {agent: layer(agent) for agent in precursors}


def _agent(agent: str, found: Mapping[str, Any], layer: int) -> AgentRecord:
    return AgentRecord(
        agent,
        found["model"],
        layer,
        found["state"],
        any(span["name"] == "prefill" for span in found["spans"]),
        found.get("prompt_tokens", 0),
        found.get("cached_tokens", 0),
        found.get("completion_tokens", found["decoded_tokens"]),
    )


def _exit(found: Mapping[str, Any], layers: Mapping[str, int]) -> ExitRecord:
    layer = max((layers[agent] for agent in found["completed"]), default=0)
    return ExitRecord(found["cluster"], layer, found["exited"], found["end_s"] - found["start_s"])


def read_graded(records: Sequence[Path], data: Path) -> list[Graded]:
    """The answers of plain models in files of records, which must be of the questions in `data`.

    Those of topologies and `auto`, and failed requests, say nothing of one model and are left out. Raises
    ConfigError and DataError.
    """
    texts = {item.index: item.question for item in read_items(data, grader="auto", offset=0, limit=None)}
    found = [graded for file in records for graded in _graded(file, texts)]
    if not found:
        raise ConfigError(
            "The records hold no answer of a plain model.",
            remedy="Write them with `shell-router eval --records FILE small medium large`.",
        )
    return found


def _graded(file: Path, texts: dict[int, str]) -> list[Graded]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.", remedy="Name a file that --records wrote.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = orjson.loads(line)
            setting, agents = record["setting"], record["agents"]
            if not record["error"] and len(agents) == 1 and agents[0]["model"] == setting:
                found.append(Graded(texts[record["question"]], setting, bool(record["right"])))
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f"{file}:{number}: this is no record of a question in the data ({type(error).__name__}: {error}).",
                remedy="Name records, and as --data the file of their questions.",
            ) from None
    return found
