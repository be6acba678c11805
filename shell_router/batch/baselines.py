"""Plans that need no solver: what MOSAIC compares itself with, and a start for the solver."""

import heapq
from collections.abc import Callable, Mapping

from shell_router.batch.plan import Expert, Plan, Session, Shares, Workload, sessions_of, work_bound_s

BISECTIONS = 40


def round_robin(workload: Workload) -> Plan:
    """Whole experts in the order given: m goes to worker m mod N (section 5.1)."""
    shares: list[dict[str, int]] = [{} for _ in range(workload.workers)]
    for number, expert in enumerate(workload.asked):
        shares[number % workload.workers][expert.name] = expert.prompts
    return _planned("round-robin", workload, shares)


def longest_first(workload: Workload) -> Plan:
    """Whole experts, the longest first, each to the worker that is done first and has room (LPT)."""
    shares: list[dict[str, int]] = [{} for _ in range(workload.workers)]
    free = [(0.0, worker) for worker in range(workload.workers)]
    for expert in sorted(workload.asked, key=lambda expert: -expert.session_s(expert.prompts)):
        done_s, worker = heapq.heappop(free)
        shares[worker][expert.name] = expert.prompts
        if len(shares[worker]) < workload.capacity:
            heapq.heappush(free, (done_s + expert.session_s(expert.prompts), worker))
    return _planned("longest-first", workload, shares)


def split(workload: Workload) -> Plan | None:
    """Experts split over workers where they do not fit into one; None where that helps nobody.

    The shortest makespan, by bisection, for which each expert in turn, the longest first, fits into the fullest worker
    that can take it whole, or fills up the emptiest until it does.
    """
    low_s, high_s = work_bound_s(workload), longest_first(workload).makespan_s
    best: Shares | None = None
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if shares := _filled(workload, middle_s):
            best, high_s = shares, middle_s
        else:
            low_s = middle_s
    return None if best is None else _planned("split", workload, best)


def _filled(workload: Workload, limit_s: float) -> Shares | None:
    shares: list[dict[str, int]] = [{} for _ in range(workload.workers)]
    room_s = [limit_s] * workload.workers

    def put(worker: int, expert: Expert, prompts: int) -> None:
        shares[worker][expert.name] = prompts
        room_s[worker] -= expert.session_s(prompts)

    for expert in sorted(workload.asked, key=lambda expert: -expert.session_s(expert.prompts)):
        left = expert.prompts
        for _ in range(expert.replicas(workload.workers)):
            open_to = [
                w for w, share in enumerate(shares) if len(share) < workload.capacity and expert.name not in share
            ]
            whole = [worker for worker in open_to if expert.session_s(left) <= room_s[worker]]
            if whole:
                put(min(whole, key=room_s.__getitem__), expert, left)
                left = 0
                break
            emptiest = max(open_to, key=room_s.__getitem__, default=None)
            fits = 0 if emptiest is None else min(left - 1, expert.fitting(room_s[emptiest]))
            if emptiest is None or fits < 1:
                return None
            put(emptiest, expert, fits)
            left -= fits
        if left:
            return None
    return shares


def data_parallel(workload: Workload) -> Plan:
    """Every expert on all workers at once, one expert after the other (section A.6). It knows no limits."""
    sessions: list[Session] = []
    begin_s = 0.0
    for expert in workload.asked:
        sessions += _side_by_side(expert, workload.workers, begin_s)
        begin_s = max(session.end_s for session in sessions)
    ordered = sorted(sessions, key=lambda session: (session.worker, session.begin_s))
    return Plan("data-parallel", tuple(ordered), work_bound_s(workload))


def _side_by_side(expert: Expert, workers: int, begin_s: float) -> list[Session]:
    each, rest = divmod(expert.prompts, workers)
    counts = [each + (worker < rest) for worker in range(workers)]
    return [
        Session(worker, expert.name, count, begin_s, begin_s + expert.session_s(count))
        for worker, count in enumerate(counts)
        if count
    ]


def _planned(method: str, workload: Workload, shares: Shares) -> Plan:
    return Plan(method, sessions_of(workload, shares), work_bound_s(workload))


BASELINES: Mapping[str, Callable[[Workload], Plan]] = {
    "round-robin": round_robin,
    "data-parallel": data_parallel,
    "longest-first": longest_first,
}
