"""What a deployment's YAML file may say about starting engines. docs/launching.md explains it."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shell_router.config.refusal import require


def _require_flags(section: "PairLaunch | LaunchSettings") -> None:
    for name in ("flags", "prefill_flags", "decode_flags"):
        try:
            shlex.split(getattr(section, name))
        except ValueError as error:
            require(False, f"{name} cannot be split as a shell would: {error}", "Close every quote.")


@dataclass(frozen=True, slots=True)
class PairLaunch:
    """A pair that `shell-router launch` starts: the GPUs of each engine (none: SGLang chooses) and flags of its own."""

    prefill_gpus: tuple[int, ...] = ()
    decode_gpus: tuple[int, ...] = ()
    flags: str = ""
    prefill_flags: str = ""
    decode_flags: str = ""

    def __post_init__(self) -> None:
        for name in ("prefill_gpus", "decode_gpus"):
            gpus = getattr(self, name)
            require(min(gpus, default=0) >= 0, f"{name} counts GPUs from 0, so {min(gpus, default=0)} is none")
            require(len(set(gpus)) == len(gpus), f"{name} names a GPU twice")
        _require_flags(self)


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How `shell-router launch` starts engines. Flags are those of `sglang.launch_server`, as in a shell.

    `python` is the interpreter that has SGLang, by default the router's own. `folder` takes logs and random weights.
    """

    python: Path | None = None
    transfer_backend: str = "mooncake"
    flags: str = ""
    prefill_flags: str = ""
    decode_flags: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    restart_limit: int = 5
    restart_delay_s: float = 1.0

    def __post_init__(self) -> None:
        require(self.restart_limit >= 0, f"restart_limit must be at least 0, not {self.restart_limit}")
        require(self.restart_delay_s > 0, f"restart_delay_s must be above 0, not {self.restart_delay_s}")
        _require_flags(self)
