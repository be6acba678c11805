"""A deployment's configuration: one YAML file, read into frozen dataclasses that describe and check themselves."""

from shell_router.config.models import (
    AdaptersSection,
    LaunchSettings,
    ModelSettings,
    PairLaunch,
    PairSettings,
    RandomWeights,
)
from shell_router.config.read import json_schema, read_file
from shell_router.config.settings import (
    AutoSettings,
    BatchesSettings,
    CacheSettings,
    Config,
    EmbedderSettings,
    FromEnvironment,
    Limits,
    Listen,
    PredictionSettings,
    RecordSettings,
    Traces,
    read_config,
)

__all__ = [
    "AdaptersSection",
    "AutoSettings",
    "BatchesSettings",
    "CacheSettings",
    "Config",
    "EmbedderSettings",
    "FromEnvironment",
    "LaunchSettings",
    "Limits",
    "Listen",
    "ModelSettings",
    "PairLaunch",
    "PairSettings",
    "PredictionSettings",
    "RandomWeights",
    "RecordSettings",
    "Traces",
    "json_schema",
    "read_config",
    "read_file",
]
