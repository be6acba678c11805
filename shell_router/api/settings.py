"""What a deployment may say about its HTTP API."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Keys, limits and times.

    `keys` maps a name, which becomes the tenant, to its secret; without keys only callers on this machine are
    served. `max_running` counts POST requests under way; lines of batches are not among them: of those
    `batch_concurrency` run at once. `ping_s` is the silence after which a stream gets a
    comment line. A client that takes nothing of its stream for `write_timeout_s` is given up.
    """

    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_body_bytes: int = 32 * 2**20
    max_running: int = 1024
    retry_after_s: int = 1
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    ready_timeout_s: float = 5.0
    ping_s: float = 15.0
    max_file_bytes: int = 200 * 2**20
    batch_concurrency: int = 32

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name != "keys" and value <= 0:
                raise ValueError(f"{setting.name} must be above 0, not {value}")
        if not all(name and secret for name, secret in self.keys.items()):
            raise ValueError("keys must have a name and a secret each, neither of them empty")
        if len(set(self.keys.values())) < len(self.keys):
            raise ValueError("keys must differ: two names share a secret, so the tenant would be ambiguous")
