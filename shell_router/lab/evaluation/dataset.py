"""Questions and right answers from a JSONL file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from shell_router.batch.questions import Grader, grader_of, read_answer
from shell_router.errors import DataError

FORM = 'Write one object per line: {"question": "…", "answer": "…"}.'


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `index` counts the file's questions from 0; `facts` are the line's further keys.

    `labels` are sent along, for rules that read them.
    """

    index: int
    question: str
    answer: str
    grader: Grader
    facts: Mapping[str, Any]
    labels: Mapping[str, str] = field(default_factory=dict)


def read_items(
    file: Path, *, grader: Grader | Literal["auto"] = "auto", offset: int = 0, limit: int | None = None
) -> list[Item]:
    """The file's questions from `offset` on, at most `limit`. Raises DataError, which names file, line and remedy.

    With `auto` a line's own `grader` decides, or else the form of its answer. Blank lines are stepped over.
    """
    try:
        lines = [line for line in enumerate(file.read_bytes().splitlines(), 1) if line[1].strip()]
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy="Name a JSONL file of questions.") from error
    chosen = list(islice(enumerate(lines), offset, None if limit is None else offset + limit))
    if not chosen:
        raise DataError(f"{file} has {len(lines)} questions, none of them from {offset} on.", remedy=FORM)
    return [_item(f"{file}:{number}", index, line, grader) for index, (number, line) in chosen]


def _item(where: str, index: int, line: bytes, grader: Grader | Literal["auto"]) -> Item:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: this is not JSON ({error}).", remedy=FORM) from None
    if not isinstance(found, dict):
        raise DataError(f"{where}: this is not a JSON object.", remedy=FORM)
    texts = {name: found.pop(name, None) for name in ("question", "answer")}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            wrong = "is missing" if text is None else f"must be a string that is not empty, not {text!r}"
            raise DataError(f"{where}: {name} {wrong}.", remedy=FORM)
    answer, own = texts["answer"], found.pop("grader", None)
    if own is not None and own not in get_args(Grader):
        raise DataError(f"{where}: there is no grader {own!r}.", remedy=f"Known: {', '.join(get_args(Grader))}.")
    chosen: Grader = (own or grader_of(answer)) if grader == "auto" else grader
    if read_answer(answer, chosen) is None:
        raise DataError(
            f"{where}: the grader {chosen} cannot compare the answer {answer!r}.",
            remedy="Correct the answer, or let another grader judge it.",
        )
    labels = found.get("metadata", {})
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise DataError(
            f"{where}: metadata, which is sent as a request's labels, is not an object of texts.",
            remedy="Write labels and their values, or give the key another name.",
        )
    return Item(index, texts["question"], answer, chosen, found, labels)
