"""Kinds of values that several commands take."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0)


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return tuple(int(number) for number in names(text))


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    return tuple(float(number) for number in names(text))


def _whole(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
    return value
