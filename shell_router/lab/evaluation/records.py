"""The questions and settings of an evaluation, and a record per question, seed and setting."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal, cast, get_args

from shell_router.batch.data_sets import Row, read_rows
from shell_router.batch.questions import Grader, choose_grader, read_answer, read_text
from shell_router.core.exact_json import Values
from shell_router.errors import ConfigError, DataError, require
from shell_router.files.document import read_json_lines
from shell_router.prediction.scores import Graded

EvaluationGrader = Grader | Literal["math", "instructions"]
"""`math` and `instructions` are those of published data sets (see `grading`)."""
GRADERS = (*get_args(Grader), "math", "instructions")


@dataclass(frozen=True, slots=True)
class Setting:
    """An entry of `GET /v1/models`; `engine` names what serves a model that the router has."""

    name: str
    kind: Literal["model", "topology", "auto"]
    engine: str = ""


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """The options of an evaluation of a started deployment (`config`) or a running router (`url`).

    `topologies` are files and folders that a deployment serves instead of its own. `api_key` is the
    running router's. `limit_s` is the longest that one request may take. Topologies get the
    `temperature` and `max_tokens` that are set; models get temperature 0 if none is set. `json`
    gets the report, `records` a line per answer.
    """

    data: Path
    config: Path | None = None
    topologies: tuple[Path, ...] = ()
    url: str | None = None
    api_key: str | None = None
    settings: tuple[str, ...] = ()
    baseline: str | None = None
    grader: EvaluationGrader | Literal["auto"] = "auto"
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
        require(self.limit_s > 0, f"a request's limit must be above 0 s, not {self.limit_s:g}.")
        require(bool(self.seeds), "seeds is empty.", "Name at least one, as in --seeds 0.")


FORM = 'Write one object per line: {"question": "…", "answer": "…"}.'


@dataclass(frozen=True, slots=True)
class Item:
    """A question. `index` counts the file's questions from 0; `facts` are the line's keys.

    `labels` are sent along, for rules that read them.
    """

    index: int
    question: str
    answer: str
    grader: EvaluationGrader
    facts: Values
    labels: Mapping[str, str] = field(default_factory=dict)


def read_items(
    file: Path,
    *,
    grader: EvaluationGrader | Literal["auto"] = "auto",
    offset: int = 0,
    limit: int | None = None,
) -> list[Item]:
    """Read at most `limit` questions of a file or a published data set, from `offset` on.

    With `auto` a line's own `grader` decides, or else the form of its answer. Blank lines are
    skipped. Raises DataError, which names file, line and remedy.
    """
    try:
        rows = read_rows(file, file.read_bytes())
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy=FORM) from error
    chosen = list(islice(enumerate(rows), offset, None if limit is None else offset + limit))
    if not chosen:
        raise DataError(
            f"{file} has {len(rows)} questions, none of them from {offset} on.", remedy=FORM
        )
    return [_read_item(f"{file}:{number}", index, row, grader) for index, (number, row) in chosen]


def _read_item(
    where: str, index: int, row: Row | str, grader: EvaluationGrader | Literal["auto"]
) -> Item:
    if isinstance(row, str):
        raise DataError(f"{where}: {row}.", remedy=FORM)
    try:
        question = read_text(row, "question")
        answer = read_text(row, "answer")
    except TypeError as error:
        raise DataError(f"{where}: {error}", remedy=FORM) from None
    own = row.get("grader")
    if own is not None and own not in GRADERS:
        raise DataError(
            f"{where}: there is no grader {own!r}.", remedy=f"Known: {', '.join(GRADERS)}."
        )
    chosen: EvaluationGrader = (
        (own or choose_grader(answer)) if grader == "auto" or own == "instructions" else grader
    )
    if chosen in get_args(Grader) and read_answer(answer, cast(Grader, chosen)) is None:
        raise DataError(
            f"{where}: the grader {chosen} cannot compare the answer {answer!r}.",
            remedy="Correct the answer, or let another grader judge it.",
        )
    names = row.get("instruction_id_list")
    arguments = row.get("kwargs")
    are_lists = (
        isinstance(names, list) and isinstance(arguments, list) and len(names) == len(arguments)
    )
    if chosen == "instructions" and not are_lists:
        raise DataError(
            f"{where}: the grader instructions needs instruction_id_list and as many kwargs.",
            remedy="Name a file of IFBench, or let another grader judge it.",
        )
    labels = row.get("metadata", {})
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise DataError(
            f"{where}: metadata, which is sent as a request's labels, is not an object of texts.",
            remedy="Write labels and their values, or give the key another name.",
        )
    return Item(index, question, answer, chosen, row, labels)


@dataclass(frozen=True, slots=True)
class ReplyAgent:
    """An agent of an answer. `find_layer` counts from the leaves (0); `state` is the trace's word.

    It is `started` once its complete prompt was sent to its engine. `completion_tokens` are those
    that it wrote, also when it was cut off; the other counts are 0 unless it finished.
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
    """A judgement of a cluster by the early-exit gate, and its duration."""

    cluster: str
    layer: int
    exited: bool
    duration_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """A question with a seed in a setting, and its result.

    `stated` is the answer that the text states, as far as the grader understands it. `latency_s` is
    the client's wait. A failed request has only an `error`.
    """

    question: int
    seed: int
    setting: str
    right: bool = False
    stated: str | None = None
    latency_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    agents: Sequence[ReplyAgent] = ()
    exits: Sequence[ExitRecord] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request. `latency_s` is from sending to the answer's end."""

    text: str
    latency_s: float
    prompt_tokens: int
    completion_tokens: int
    agents: tuple[ReplyAgent, ...]
    exits: tuple[ExitRecord, ...]
    trace: Values


def read_reply(completion: Values, trace: Values, latency_s: float) -> Reply:
    """Read a chat completion and its trace, both in the form of docs/reference/api.md."""
    usage = completion["usage"]
    records = trace["agents"]
    layers = compute_layers(
        {agent: record.get("precursors", ()) for agent, record in records.items()}
    )
    agents = (
        ReplyAgent(
            agent,
            record["model"],
            layers[agent],
            record["state"],
            any(span["name"] == "prefill" for span in record["spans"]),
            record.get("prompt_tokens", 0),
            record.get("cached_tokens", 0),
            record.get("completion_tokens", record["decoded_tokens"]),
        )
        for agent, record in records.items()
    )
    exits = (
        ExitRecord(
            check["cluster"],
            max((layers[agent] for agent in check["completed"]), default=0),
            check["exited"],
            check["end_s"] - check["start_s"],
        )
        for check in trace["exits"]
    )
    text = completion["choices"][0]["message"]["content"] or ""
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Reply(text, latency_s, *counts, tuple(agents), tuple(exits), trace)


def compute_layers(precursors: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return each agent's longest distance from a leaf, by the agents that each one reads."""

    @cache
    def find_layer(agent: str) -> int:
        read = [precursor for precursor in precursors[agent] if precursor in precursors]
        return 1 + max(map(find_layer, read), default=-1)

    return {agent: find_layer(agent) for agent in precursors}


def read_graded(records: Sequence[Path], data: Path) -> list[Graded]:
    """Read the answers of plain models in files of records of the questions in `data`.

    Answers of topologies and `auto`, and failed requests, say nothing of one model and are left
    out. Raises ConfigError and DataError.
    """
    texts = {item.index: item.question for item in read_items(data)}
    graded = [record for file in records for record in _read_answers(file, texts)]
    if not graded:
        raise ConfigError(
            "The records hold no answer of a plain model.",
            remedy="Write them with `shell-router eval --records FILE small medium large`.",
        )
    return graded


def _read_answers(file: Path, texts: Mapping[int, str]) -> Iterator[Graded]:
    remedy = "Name records, and as --data the file of their questions."
    for where, record in read_json_lines(file, remedy):
        try:
            setting = record["setting"]
            agents = record["agents"]
            if not record["error"] and len(agents) == 1 and agents[0]["model"] == setting:
                yield Graded(texts[record["question"]], setting, bool(record["right"]))
        except (KeyError, TypeError) as error:
            wrong = f"this is no record of a question in the data ({type(error).__name__}: {error})"
            raise DataError(f"{where}: {wrong}.", remedy=remedy) from None
