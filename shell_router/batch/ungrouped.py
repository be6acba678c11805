"""Errors of tasks that ran together, as one caller wants them: one at a time."""

from collections.abc import Awaitable
from typing import TypeVar

from shell_router.errors import ShellRouterError

T = TypeVar("T")


async def ungrouped(work: Awaitable[T]) -> T:
    """What `work` returns. Of a group of nothing but ShellRouterErrors the first is raised as it is."""
    try:
        return await work
    except BaseExceptionGroup as group:
        if group.split(ShellRouterError)[1] is not None:
            raise
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
