"""How much memory torch held at most while something ran. Imports torch; the router does not."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MEMORY_EVENT = "[memory]"


def most_held(device: torch.device, work: Callable[[], Any]) -> int:
    """Bytes that `work` held at most on `device` beyond what was held before, as torch's allocator counts them.

    On CUDA nothing else may run there meanwhile. What libraries allocate by themselves is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    # the events that the profiler's tables are made of: those leave out what an operation frees again before it ends
    found = seen.profiler.kineto_results.events()
    changes = sorted((event for event in found if event.name() == MEMORY_EVENT), key=lambda event: event.start_ns())
    return int(max(accumulate((event.nbytes() for event in changes), initial=0)))
