"""From a file to a checked Config."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shell_router.config.read import read_file
from shell_router.config.settings import Config, FromEnvironment
from shell_router.errors import ConfigError


def load_config(path: Path, environ: Mapping[str, str], *, with_keys: bool = True) -> Config:
    """The deployment that `path` describes, keys from the environment filled in unless nobody will ask for them.

    Raises ConfigError, whose message begins with the file and, where known, the line.
    """
    config, where = read_file(path, Config)
    assert isinstance(config, Config)
    config = replace(config, embedder=config.embedder.found_from(path.parent))
    if not with_keys:
        return config
    keys = {
        tenant: _resolve(where(("api_keys", tenant)), tenant, key, environ) for tenant, key in config.api_keys.items()
    }
    _require_distinct(path, keys)
    return replace(config, api_keys=keys)


def _resolve(where: str, tenant: str, key: str | FromEnvironment, environ: Mapping[str, str]) -> str:
    value = environ.get(key.env, "") if isinstance(key, FromEnvironment) else key
    if value:
        return value
    name = key.env if isinstance(key, FromEnvironment) else ""
    raise ConfigError(
        f"{where}: the API key of {tenant!r} is empty.",
        remedy=f"Set the environment variable {name}." if name else "Write a key, or {env: NAME}.",
    )


def _require_distinct(path: Path, keys: Mapping[str, str]) -> None:
    owner: dict[str, str] = {}
    for tenant, key in keys.items():
        if key in owner:
            raise ConfigError(
                f"{path}: {owner[key]!r} and {tenant!r} have the same API key.",
                remedy="Give each tenant its own.",
            )
        owner[key] = tenant
