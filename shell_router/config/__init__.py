"""A deployment's configuration: one YAML file, read into frozen dataclasses that describe and check
themselves.
"""

from shell_router.config.models import (
    LaunchSettings,
    ModelSettings,
    PairLaunch,
    PairSettings,
    SwappingSettings,
)
from shell_router.config.read import json_schema
from shell_router.config.settings import (
    ApiKey,
    AutoSettings,
    BatchesSettings,
    CacheSettings,
    Config,
    EmbedderSettings,
    Limits,
    Listen,
    ListenTls,
    PredictionSettings,
    read_config,
    read_keys,
)

__all__ = [
    "ApiKey",
    "AutoSettings",
    "BatchesSettings",
    "CacheSettings",
    "Config",
    "EmbedderSettings",
    "LaunchSettings",
    "Limits",
    "Listen",
    "ListenTls",
    "ModelSettings",
    "PairLaunch",
    "PairSettings",
    "PredictionSettings",
    "SwappingSettings",
    "json_schema",
    "read_config",
    "read_keys",
]
