"""What a cache that shares its logs counts, for whoever exports metrics."""

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Counters since the cache was made; read them at any time, they only grow (`degraded` aside).

    `published` and `lost_writes` count stream entries: begin marks, batches of chunks, end marks. An entry that the
    store did not take is lost once per attempt, and sent again when the store is back. `withdrawn` logs are served to
    this process only, as the store dropped them or another process had begun them.
    """

    degraded: bool = False
    published: int = 0
    lost_writes: int = 0
    reconnects: int = 0
    failed_reads: int = 0
    withdrawn: int = 0
