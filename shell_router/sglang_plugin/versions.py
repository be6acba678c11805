"""Which versions of SGLang the plugin is written for."""

import re

SUPPORTED = ">=0.5.16,<0.6"
_FIRST, _FIRST_NOT = (0, 5, 16), (0, 6)
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def is_supported(version: str) -> bool:
    """Whether `version` lies in `SUPPORTED`; pre-releases and builds count as their release."""
    release = _RELEASE.match(version)
    if release is None:
        return False
    return _FIRST <= tuple(int(part or 0) for part in release.groups()) < _FIRST_NOT
