"""How a setting refuses a value."""

from shell_router.errors import ConfigError


def require(holds: bool, message: str, remedy: str = "") -> None:
    """Raise ConfigError unless `holds`; the reader adds file and line."""
    if not holds:
        raise ConfigError(message, remedy=remedy)
