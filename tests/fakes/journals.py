"""Journals in this process.

A test can take them away, lose them, or copy them as they stood when a router died.
"""

from collections.abc import Sequence

from agent_cache import CacheUnavailable, JournalDiffers, JournalTaken


class MemoryJournals:
    """A journal per key, whatever the tenant; leases do not end by themselves."""

    def __init__(self, records: Sequence[bytes] = (), head: str = "head") -> None:
        self.lease_s = 0.03
        self.head = head
        self.records = list(records)
        self.owner: str | None = None
        self.claimed_by = ""
        self.away = False
        self.lost = False
        self.appends = 0
        self.refused = 0
        self.now_s = 0.0

    def read_clock(self) -> float:
        return self.now_s

    async def claim(self, tenant: str, key: str, owner: str, head: str) -> Sequence[bytes] | None:
        self._reach()
        if head != self.head:
            raise JournalDiffers(key)
        if self.owner not in (None, owner):
            return None
        self.owner = self.claimed_by = owner
        return list(self.records)

    async def append(
        self, tenant: str, key: str, owner: str, position: int, records: Sequence[bytes]
    ) -> bool:
        self._reach()
        self.appends += 1
        if self.lost or len(self.records) < position:
            return False
        if self.claimed_by != owner:
            raise JournalTaken(key)
        self.owner = owner
        self.records[position:] = records
        return True

    async def release(self, tenant: str, key: str, owner: str) -> None:
        self._reach()
        self.owner = None if self.owner == owner else self.owner

    def _reach(self) -> None:
        if self.away:
            self.refused += 1
            raise CacheUnavailable("the store is away")
