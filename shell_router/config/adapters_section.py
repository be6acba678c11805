"""What a deployment's YAML file may say about a model's adapters. docs/adapters.md explains it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shell_router.config.refusal import require
from shell_router.engines.adapters.settings import AdapterSettings


@dataclass(frozen=True, slots=True)
class AdaptersSection:
    """LoRA adapters of a model: `folder` holds a PEFT folder of each, and a server `room` of them at a time.

    `max_rank` is the highest rank that engines are started for; the others are those of `AdapterSettings`.
    """

    folder: Path
    room: int
    max_rank: int = 64
    window_s: float = 10.0
    evict: str = "queue-aware"
    wait_s: float = 60.0
    load_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.max_rank > 0, f"max_rank must be at least 1, not {self.max_rank}")
        self.of({})

    def of(self, folders: Mapping[str, Path]) -> AdapterSettings:
        """What the model's pool is told, `folders` by the adapters' names. Raises ConfigError."""
        return AdapterSettings(folders, self.room, self.window_s, self.evict, self.wait_s, self.load_s)
