"""Errors of component pools."""

from shell_router.errors import InvalidRequest, ShellRouterError


class UnknownComponent(InvalidRequest):
    """The pool has no component of that name."""


class ComponentError(ShellRouterError):
    """A component of a pool could not serve a request."""


class ComponentTooLarge(ComponentError):
    """The component and one sample fit into no executor's memory, however empty."""


class ComponentFailed(ComponentError):
    """The component did not load, or failed on the batch that the request was in; the cause is
    chained.
    """


class MemoryBudgetExceeded(ComponentError):
    """More memory was to be reserved than its budget has left: nothing was allocated."""
