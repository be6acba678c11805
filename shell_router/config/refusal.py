"""How a setting refuses a value."""

from shell_router.errors import ConfigError


class SettingRefused(ConfigError):
    """A setting has a value that cannot be; the reader adds file and line."""


def require(holds: bool, message: str, remedy: str = "") -> None:
    """Raise SettingRefused unless `holds`."""
    if not holds:
        raise SettingRefused(message, remedy=remedy)
