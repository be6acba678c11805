"""The order of SGLang's own waiting queue: our prefill-only updates yield to all other requests.

They yield a bounded number of times. If SHELL_ROUTER_SHORTEST_PREFILL_AGE_S is set, the other
requests are in the order of Gimbal's Algorithm 2: the shortest prefill first, but requests that
have waited for that many seconds before all. SGLang's `--schedule-policy shortest-prefill-first`
never ages.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from shell_router.sglang_plugin.compatibility import Feature
from shell_router.sglang_plugin.patches import is_ours

logger = logging.getLogger(__name__)

TURNS: Final = 64
"""The number of times that a request of ours yields.

It is counted, not timed: all ranks of a server must choose alike.
"""

VARIABLE: Final = "SHELL_ROUTER_SHORTEST_PREFILL_AGE_S"


def read_age_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the age that the environment sets; None, with an error in the log, if it is no age."""
    text = environ.get(VARIABLE)
    if text is None:
        return None
    try:
        age_s = float(text)
    except ValueError:
        age_s = 0.0
    if age_s > 0:
        return age_s
    logger.error(
        "%s is %r, and is ignored: no request ages. Set it to seconds above 0, such as 5.",
        VARIABLE,
        text,
    )
    return None


def make_reorder(
    age_s: float | None,
    clock: Callable[[], float] = time.perf_counter,
    ranks: Callable[[], int] | None = None,
) -> Callable[..., None]:
    """Return the hook to run after `SchedulePolicy.calc_priority`.

    `clock` is the clock of `wait_queue_entry_time`. The hook leaves alone servers that schedule by
    priority. In servers of several ranks requests do not age: each rank's clock is its own, and
    ranks that choose different requests deadlock.
    """
    count = ranks or world_size
    warned = False

    def reorder(
        _sorted: None, policy: Any, waiting_queue: list[Any], *_arguments: Any, **_keywords: Any
    ) -> None:
        nonlocal warned
        if len(waiting_queue) < 2 or policy.enable_priority_scheduling:
            return
        if age_s is not None and count() == 1:
            now_s = clock()
            waiting_queue.sort(key=lambda request: _sort_key(request, now_s, age_s))
            return
        if age_s is not None and not warned:
            warned = True
            logger.error("%s has no effect: it is for servers of one rank.", VARIABLE)
        waiting_queue.sort(key=_yields)

    return reorder


def _sort_key(request: Any, now_s: float, age_s: float) -> tuple[int, float]:
    """Return a sort key: aged requests by arrival, then others by length, then yielding updates."""
    arrived_s = request.time_stats.wait_queue_entry_time
    last = _yields(request)
    if now_s - arrived_s >= age_s and not last:
        return 0, arrived_s
    cached = getattr(request, "num_matched_prefix_tokens", 0)
    return 2 if last else 1, len(request.origin_input_ids) - cached


def _yields(request: Any) -> bool:
    """Return whether `request` lets all others go first this time; call it once a sort."""
    if not is_ours(request):
        return False
    request.shell_router_turns = getattr(request, "shell_router_turns", 0) + 1
    return bool(request.shell_router_turns <= TURNS)


def world_size() -> int:
    """Return the number of ranks of this server."""
    import torch

    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def make_feature(age_s: float | None) -> Feature:
    """Return the hook that reorders the queue."""
    calc_priority = "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority"
    return Feature(hooks=((calc_priority, make_reorder(age_s), "AFTER"),))
