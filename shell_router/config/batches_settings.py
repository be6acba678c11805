"""What a deployment's file may say about batches of requests. docs/batches.md explains it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shell_router.config.refusal import require


@dataclass(frozen=True, slots=True)
class BatchesSettings:
    """Files of requests that are answered beside the online ones. Without a `folder` there are none.

    Lines may name one of `pools` as their model: the file that describes it.
    """

    folder: Path | None = None
    concurrency: int = 32
    max_file_bytes: int = 200 * 2**20
    pools: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_file_bytes"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be above 0, not {value}")
