"""SGLang's own waiting queue: prefill-only updates of ours yield to all other requests, a bounded
number of times.

Where SHELL_ROUTER_SHORTEST_PREFILL_AGE_S is set, the others are in the order of Gimbal's Algorithm
2: the shortest prefill first, but those that have waited for that many seconds before all. SGLang's
`--schedule-policy shortest-prefill-first` never ages.
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
"""How often a request of ours yields. Counted, not timed: all ranks of a server must choose alike.
"""

VARIABLE: Final = "SHELL_ROUTER_SHORTEST_PREFILL_AGE_S"


def asked_age_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """The seconds that the environment asks for; None, with an error in the log, where they are no
    seconds.
    """
    given = environ.get(VARIABLE)
    if given is None:
        return None
    try:
        age_s = float(given)
    except ValueError:
        age_s = 0.0
    if age_s > 0:
        return age_s
    logger.error(
        "%s is %r, and is ignored: no request ages. Set it to seconds above 0, such as 5.",
        VARIABLE,
        given,
    )
    return None


def updates_last(
    age_s: float | None,
    clock: Callable[[], float] = time.perf_counter,
    ranks: Callable[[], int] | None = None,
) -> Callable[..., None]:
    """What is to run after `SchedulePolicy.calc_priority`; `clock` is that of
    `wait_queue_entry_time`.

    It leaves alone servers that schedule by priority. Those of several ranks do not age: each
    rank's clock is its own, and ranks that choose different requests deadlock.
    """
    count = ranks or world_size
    warned = False

    def reorder(
        _sorted: None, policy: Any, waiting_queue: list[Any], *_arguments: Any, **_named: Any
    ) -> None:
        nonlocal warned
        if len(waiting_queue) < 2 or policy.enable_priority_scheduling:
            return
        if age_s is not None and count() == 1:
            now_s = clock()
            waiting_queue.sort(key=lambda request: _key(request, now_s, age_s))
            return
        if age_s is not None and not warned:
            warned = True
            logger.error("%s has no effect: it is for servers of one rank.", VARIABLE)
        waiting_queue.sort(key=_yields)

    return reorder


def _key(request: Any, now_s: float, age_s: float) -> tuple[int, float]:
    """Aged requests by their arrival, then others, the shortest first, then updates that yield."""
    arrived_s = request.time_stats.wait_queue_entry_time
    last = _yields(request)
    if now_s - arrived_s >= age_s and not last:
        return 0, arrived_s
    cached = getattr(request, "num_matched_prefix_tokens", 0)
    return 2 if last else 1, len(request.origin_input_ids) - cached


def _yields(request: Any) -> bool:
    """Whether it lets all others go first this time; called once a sort."""
    if not is_ours(request):
        return False
    request.shell_router_turns = getattr(request, "shell_router_turns", 0) + 1
    return bool(request.shell_router_turns <= TURNS)


def world_size() -> int:
    """How many ranks work together here."""
    import torch

    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def feature(age_s: float | None) -> Feature:
    """The hook that reorders the queue."""
    calc_priority = "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority"
    return Feature(hooks=((calc_priority, updates_last(age_s), "AFTER"),))
