"""A deployment's configuration: one YAML file, read into frozen dataclasses."""

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
    "CacheSettings",
    "Config",
    "EmbeddedSection",
    "EmbedderSettings",
    "FromEnvironment",
    "Limits",
    "Listen",
    "ModelSettings",
    "PairSettings",
    "RandomWeights",
    "Traces",
    "load_config",
]
