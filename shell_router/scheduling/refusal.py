"""How settings of this package refuse values."""

from shell_router.errors import ConfigError


def require(holds: bool, otherwise: str) -> None:
    """Raise ConfigError with `otherwise`, a sentence without its full stop, unless it `holds`."""
    if not holds:
        raise ConfigError(f"{otherwise}.", remedy="docs/policies.md explains each setting.")
