"""The SGLang versions and names that the plugin needs.

They are looked up first, so that the plugin is wholly on or wholly off.
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
    """Return whether `version` lies in `SUPPORTED`; a pre-release counts as its release."""
    release = _RELEASE.match(version)
    if release is None:
        return False
    return _FIRST <= tuple(int(part or 0) for part in release.groups()) < _FIRST_NOT


Hook = tuple[str, Callable[..., Any], str]
"""The name of SGLang's function, the hook, and when the hook runs: AFTER, AROUND or BEFORE."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Hooks that are registered together if SGLang has every name that they need, else not at all.

    `needs` are further names besides the hooks' own. `sets` maps the name of an `__init__` to the
    attributes that it sets: no class has them, so they are looked for in its code.
    """

    hooks: Sequence[Hook]
    needs: Sequence[str] = ()
    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """Return the names that this SGLang lacks. Imports the modules that are hooked."""
        lacking = [
            name
            for name in (*(name for name, _, _ in self.hooks), *self.needs)
            if not _exists(name)
        ]
        for init, attributes in self.sets.items():
            if init not in lacking:
                code = getattr(inspect.unwrap(pkgutil.resolve_name(init)), "__code__", None)
                names = () if code is None else code.co_names
                lacking += [
                    f"{init.split('.')[-2]}.{name}" for name in attributes if name not in names
                ]
        return lacking

    def register(self) -> None:
        """Register the hooks with SGLang."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for name, hook, when in self.hooks:
            HookRegistry.register(name, hook, getattr(HookType, when))


def _exists(name: str) -> bool:
    """Return whether this SGLang has an object of that name."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


REQUEST: Final = "sglang.srt.managers.schedule_batch.Req.__init__"
