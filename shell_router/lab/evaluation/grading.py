"""The grading of answers: as in batches, by math-verify for formulas, and by IFBench's checks.

Grading blocks the event loop, math-verify for seconds in the worst case: grade while no request
runs.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from shell_router.batch.questions import read_answer
from shell_router.errors import DataError
from shell_router.lab.evaluation.records import Item

_PACKAGES = {
    "math": ("math_verify", "pip install 'shell-router[data]'"),
    "instructions": (
        "ifbench.instructions_registry",
        "pip install 'ifbench @ git+https://github.com/allenai/IFBench'",
    ),
}
"""By grader the module that it needs, and how to get it."""


def require_graders(items: Iterable[Item]) -> None:
    """Raise DataError where a package that grades these questions is missing."""
    for grader in {item.grader for item in items} & set(_PACKAGES):
        _import_package(grader)


def grade(item: Item, text: str) -> tuple[bool, str | None]:
    """Return whether `text` is right, and its stated answer if the grader finds one.

    Raises DataError.
    """
    if item.grader == "instructions":
        return follows_instructions(
            item, text, _import_package("instructions").INSTRUCTION_DICT
        ), None
    if item.grader == "math":
        return _equals(item.answer, text)
    value = read_answer(text, item.grader)
    return value is not None and value == read_answer(
        item.answer, item.grader
    ), None if value is None else str(value)


def _equals(answer: str, text: str) -> tuple[bool, str | None]:
    math_verify = _import_package("math")
    parsed = math_verify.parse(text)
    right = math_verify.parse(f"\\boxed{{{answer}}}")
    return bool(math_verify.verify(right, parsed)), str(parsed[-1]) if parsed else None


def follows_instructions(item: Item, text: str, checks: Mapping[str, Any]) -> bool:
    """Return whether the text follows every instruction strictly.

    `known` are IFBench's classes of checks by name.
    """
    if not text.strip():
        return False
    for name, arguments in zip(
        item.facts["instruction_id_list"], item.facts["kwargs"], strict=True
    ):
        if name not in checks:
            raise DataError(
                f"IFBench's checks know no instruction {name!r}.",
                remedy="Install another release of it.",
            )
        instruction = checks[name](name)
        instruction.build_description(
            **{key: value for key, value in arguments.items() if value is not None}
        )
        if "prompt" in (instruction.get_instruction_args() or ()):
            instruction.build_description(prompt=item.facts["prompt"])
        if not instruction.check_following(text):
            return False
    return True


def _import_package(grader: str) -> ModuleType:
    name, install = _PACKAGES[grader]
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"The grader {grader} needs {name} ({error}).", remedy=f"Install it: {install}."
        ) from None
