"""Graded answers from `shell-router eval --records`, with the questions' texts."""

from collections.abc import Sequence
from pathlib import Path

import orjson

from shell_router.errors import ConfigError, DataError
from shell_router.evaluation.dataset import read_items
from shell_router.prediction.teaching import Graded


def read_graded(records: Sequence[Path], data: Path) -> list[Graded]:
    """The answers of plain models in files of records, which must be of the questions in `data`.

    Those of votes, topologies and `auto`, and failed requests, say nothing of one model and are left out. Raises
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
