"""The SGLang versions and names that the plugin needs: looked up first, so that it is wholly on or
wholly off.
"""

import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SUPPORTED = ">=0.5.16,<0.6"
_FIRST = (0, 5, 16)
_FIRST_NOT = (0, 6)
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def is_supported(version: str) -> bool:
    """Whether `version` lies in `SUPPORTED`; pre-releases and builds count as their release."""
    release = _RELEASE.match(version)
    if release is None:
        return False
    return _FIRST <= tuple(int(part or 0) for part in release.groups()) < _FIRST_NOT


Hook = tuple[str, Callable[..., Any], str]
"""The name of what SGLang calls, what is to run, and when: after it, around it or before it."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Hooks that are registered together, or not at all: where SGLang has all the names that they
    need.

    `needs` are names besides the hooks' own; `sets` are attributes that the `__init__` of that name
    sets: no class has them, so they are looked for in its code.
    """

    hooks: Sequence[Hook]
    needs: Sequence[str] = ()
    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """What this SGLang lacks. Imports the modules that are hooked."""
        lacking = [
            name
            for name in (*(name for name, _, _ in self.hooks), *self.needs)
            if not _is_found(name)
        ]
        for init, attributes in self.sets.items():
            if init not in lacking:
                code = getattr(inspect.unwrap(pkgutil.resolve_name(init)), "__code__", None)
                known = () if code is None else code.co_names
                lacking += [
                    f"{init.split('.')[-2]}.{name}" for name in attributes if name not in known
                ]
        return lacking

    def register(self) -> None:
        """Let SGLang call the hooks."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for name, hook, when in self.hooks:
            HookRegistry.register(name, hook, getattr(HookType, when))


def _is_found(name: str) -> bool:
    """Whether this SGLang has what is called so."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


REQUEST: Final = "sglang.srt.managers.schedule_batch.Req.__init__"
