"""Bytes that are counted before they are used."""

from shell_router.errors import MemoryBudgetExceeded


class Memory:
    """A budget that cannot be exceeded: what does not fit is refused before anybody allocates it."""

    def __init__(self, name: str, budget_bytes: int) -> None:
        self._name = name
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._held: dict[str, int] = {}
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What can still be reserved."""
        return self.budget_bytes - self.used_bytes

    def reserve(self, owner: str, wanted_bytes: int) -> None:
        """Raises MemoryBudgetExceeded where it does not fit, or where `owner` holds some already."""
        if owner in self._held or wanted_bytes > self.free_bytes:
            raise MemoryBudgetExceeded(
                f"{owner!r} wants {wanted_bytes} bytes of {self._name}, where {self.free_bytes} of"
                f" {self.budget_bytes} are free.",
                remedy="This is a defect of the pool: it reserves only what fits. Please report it.",
            )
        self._held[owner] = wanted_bytes
        self.used_bytes += wanted_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, owner: str) -> None:
        """Give back what `owner` holds; KeyError where it holds nothing."""
        self.used_bytes -= self._held.pop(owner)
