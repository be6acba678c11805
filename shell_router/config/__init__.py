"""A deployment's configuration: one YAML file, read into frozen dataclasses."""

from shell_router.config.adapters_section import AdaptersSection
from shell_router.config.batches_settings import BatchesSettings
from shell_router.config.choice_settings import AutoSettings, PredictionSettings, RecordSettings
from shell_router.config.launch_settings import LaunchSettings, PairLaunch
from shell_router.config.load import load_config
from shell_router.config.settings import (
    CacheSettings,
    Config,
    EmbeddedSection,
    EmbedderSettings,
    FromEnvironment,
    Limits,
    Listen,
    ModelSettings,
    PairSettings,
    RandomWeights,
    Traces,
)

__all__ = [
    "AdaptersSection",
    "AutoSettings",
    "BatchesSettings",
    "CacheSettings",
    "Config",
    "EmbeddedSection",
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
    "load_config",
]
