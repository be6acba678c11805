"""A deployment's configuration: one YAML file, read into frozen dataclasses."""

from shell_router.config.deployment import Config
from shell_router.config.load import deployment_schema, read_config, read_keys
from shell_router.config.models import (
    LaunchSettings,
    ModelSettings,
    PairLaunch,
    PairSettings,
    SwappingSettings,
)
from shell_router.config.settings import (
    ApiKey,
    AutoSettings,
    BatchesSettings,
    CacheSettings,
    EmbedderSettings,
    Limits,
    Listen,
    ListenTls,
    PredictionSettings,
    UsageCount,
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
    "UsageCount",
    "deployment_schema",
    "read_config",
    "read_keys",
]
