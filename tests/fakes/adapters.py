"""Adapters for scripted servers, and a loader that a test opens and closes."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from shell_router.errors import EngineError
from shell_router.expert_pools import Expert


def write_adapters(folder: Path, names: Iterable[str], rank: int = 8) -> Mapping[str, Path]:
    """A PEFT folder without weights for each, which is all that a scripted server looks at."""
    found = {}
    for name in names:
        at = folder / name
        at.mkdir(parents=True)
        (at / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
        found[name] = at
    return found


class GatedLoader:
    """Loads at once, or where `gate` is closed when it opens. Raises `errors[name]` instead, while it is there.

    `loaded` is what lies on the server, `most` the most that did at a time, `loads` all loads in their order.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: dict[str, EngineError] = {}
        self.loaded: set[str] = set()
        self.loads: list[str] = []
        self.most = 0

    async def load(self, expert: Expert, place: str) -> None:
        await self.gate.wait()
        await asyncio.sleep(0)
        if expert.name in self.errors:
            raise self.errors[expert.name]
        assert expert.name not in self.loaded
        self.loaded.add(expert.name)
        self.loads.append(expert.name)
        self.most = max(self.most, len(self.loaded))

    async def unload(self, expert: Expert, place: str) -> None:
        await asyncio.sleep(0)
        self.loaded.remove(expert.name)
