"""A sample of what a pool of experts is asked: JSONL, one chain of experts per line."""

from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random

import orjson

from shell_router.errors import ConfigError, DataError
from shell_router.expert_pools.usage import Rule, check_chain

FORM = 'Write one object per line: {"chain": ["type-7", "detector-3"]}.'


def read_chains(file: Path, known: Collection[str]) -> list[tuple[str, ...]]:
    """The chains in their order, all of them of `known` experts.

    Raises DataError, with file and line, for the first line that is none, and for a file without any.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy="Name a JSONL file of chains.") from error
    found = [_chain(line, f"{file}:{number}", known) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{file} holds no chain.", remedy=FORM)
    return found


def _chain(line: bytes, at: str, known: Collection[str]) -> tuple[str, ...]:
    try:
        chain = orjson.loads(line)["chain"]
        if not isinstance(chain, list) or not all(isinstance(name, str) for name in chain):
            raise TypeError("chain must be a list of names")
        check_chain(chain)
    except ConfigError as error:
        raise DataError(f"{at}: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{at}: this is no chain ({error}).", remedy=FORM) from error
    for name in chain:
        if name not in known:
            raise DataError(f"{at}: there is no expert {name!r}.", remedy="Name those whose weights are in the folder.")
    return tuple(chain)


def drawn_chains(rules: Sequence[Rule], number: int, draw: Random) -> list[tuple[str, ...]]:
    """So many chains, each drawn alone by the rules' shares."""
    upto = list(accumulate(rule.share for rule in rules))
    return [rule.chain for rule in draw.choices(rules, cum_weights=upto, k=number)]
