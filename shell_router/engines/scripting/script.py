"""What a scripted server does: its settings, and the faults it plays on purpose."""

from dataclasses import dataclass
from typing import Any, Literal

FaultKind = Literal["refuse", "status", "close", "stall", "garbage", "error_event", "abort"]
_KINDS = ("refuse", "status", "close", "stall", "garbage", "error_event", "abort")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with a request.

    `refuse` breaks the connection at once and `status` answers `status`; the others strike after `after_tokens` tokens
    of a stream, or instead of an answer that is not streamed. It strikes `times` requests, or all when None.
    """

    kind: FaultKind
    after_tokens: int = 0
    status: int = 500
    message: str = "scripted fault"
    times: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"fault kind must be one of {', '.join(_KINDS)}, not {self.kind!r}")


@dataclass(frozen=True, slots=True)
class ScriptedSettings:
    """How a scripted server behaves.

    Delays are seconds: `prefill_s` plus `prefill_token_s` for each token not cached, then `token_s` for each
    token; with `token_s` 0 a whole answer is written at once. `warms` names the prefill-only requests that fill
    the prefix cache, which holds `cache_prompts`; without `route` there is no such route. `cut_bytes` above 0
    writes in pieces of that size, `crlf` ends lines as some proxies do. `log_bodies` keeps the bodies of that
    many last requests. `priorities` says whether it claims to schedule by priority, and which go first. With `stamped`
    every output says in `meta_info.sent_s` when it was written, in seconds of the machine's monotonic clock. With
    `adapter_room` it takes so many adapters at a time, each of which takes `adapter_load_s` to load.
    """

    role: Literal["prefill", "decode"] = "decode"
    incremental: bool = True
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    token_s: float = 0.0
    vocabulary: int = 1000
    context_length: int = 32768
    cache_prompts: int = 4096
    warms: tuple[Literal["route", "fake_host"], ...] = ("route",)
    cut_bytes: int = 0
    crlf: bool = False
    log_bodies: int = 0
    priorities: Literal["none", "low_first", "high_first"] = "none"
    stamped: bool = False
    adapter_room: int = 0
    adapter_load_s: float = 0.0
    fault: Fault | None = None

    def __post_init__(self) -> None:
        for name in (
            "prefill_s",
            "prefill_token_s",
            "token_s",
            "cut_bytes",
            "log_bodies",
            "cache_prompts",
            "adapter_room",
            "adapter_load_s",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be below 0, but is {getattr(self, name)}")
        for name in ("vocabulary", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


DEFAULT_SETTINGS = ScriptedSettings()


def read_script(found: dict[str, Any]) -> dict[str, Any]:
    """The settings to change, from the body of `POST /script`; raises TypeError or ValueError."""
    changes = dict(found)
    if changes.get("fault") is not None:
        changes["fault"] = Fault(**changes["fault"])
    if "warms" in changes:
        changes["warms"] = tuple(changes["warms"])
    return changes
