"""A deployment's configuration: one YAML file, read into frozen dataclasses that describe and check themselves."""

from shell_router.config.models import (
    AdaptersSection,
    LaunchSettings,
    ModelSettings,
    PairLaunch,
    PairSettings,
)
from shell_router.config.read import json_schema
from shell_router.config.settings import (
    AutoSettings,
    BatchesSettings,
    CacheSettings,
    Config,
    EmbedderSettings,
    Limits,
    Listen,
    PredictionSettings,
    read_config,
)

__all__ = [
    "AdaptersSection",
    "AutoSettings",
    "BatchesSettings",
    "CacheSettings",
    "Config",
    "EmbedderSettings",
    "LaunchSettings",
    "Limits",
    "Listen",
    "ModelSettings",
    "PairLaunch",
    "PairSettings",
    "PredictionSettings",
    "json_schema",
    "read_config",
]
