"""What is known of a file and of a batch, and how OpenAI's clients are told of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDS: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
TOLD_TIMES: tuple[Status, ...] = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of one tenant. Its content never changes. `created_at` is Unix time."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def as_told(self) -> dict[str, Any]:
        """OpenAI's file object."""
        told = {"object": "file", "status": "processed", "status_details": None, "expires_at": None}
        return {**told, **{name: value for name, value in asdict(self).items() if name != "tenant"}}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a batch, or with one line of its input; lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch of one tenant. `at` says when it came to each status; all times are Unix times.

    Until it has ended its counts are only in memory: its results tell them.
    """

    id: str
    tenant: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    status: Status = "validating"
    at: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    faults: tuple[Fault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @classmethod
    def read(cls, **stored: Any) -> "BatchRecord":
        """The record that was stored as JSON."""
        faults = tuple(Fault(**fault) for fault in stored.pop("faults"))
        return cls(**stored, faults=faults)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDS

    @property
    def output_name(self) -> str:
        """The id that the file of its answers has, or will have."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def errors_name(self) -> str:
        """The id that the file of its failed lines has, or will have."""
        return f"file-{self.id.removeprefix('batch_')}-errors"

    def moved(self, status: Status, now: int) -> "BatchRecord":
        """The same batch come to `status`."""
        return replace(self, status=status, at={**self.at, status: now})

    def as_told(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        errors = {"object": "list", "data": [asdict(fault) for fault in self.faults]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors if self.faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.at.get(status) for status in TOLD_TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
