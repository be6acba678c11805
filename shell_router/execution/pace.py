"""How long things take on each model, as this router has measured them, and how many prompts grow there."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shell_router.topology import Topology

_WEIGHT = 0.2  # of the newest measurement: a change of load shows after about five


class Pace:
    """Exponential means per model alias; absent until first measured."""

    def __init__(self) -> None:
        self._run_s: dict[str, float] = {}
        self._increment_s: dict[str, float] = {}
        self._growing: Counter[str] = Counter()

    def observe_run(self, model: str, seconds: float) -> None:
        """An agent of `model` took this long from its complete prompt to its end."""
        _blend(self._run_s, model, seconds)

    def observe_increment(self, model: str, seconds: float) -> None:
        """A prefill-only update on `model` took this long."""
        _blend(self._increment_s, model, seconds)

    def increment_s(self, model: str) -> float | None:
        """Mean seconds of a prefill-only update."""
        return self._increment_s.get(model)

    @contextmanager
    def growing(self, model: str) -> Iterator[None]:
        """A prompt of `model` grows, and is prefilled meanwhile, as long as the context is open."""
        self._growing[model] += 1
        try:
            yield
        finally:
            self._growing[model] -= 1

    def growing_prompts(self, model: str) -> int:
        """Prompts of `model` that grow now."""
        return self._growing[model]

    def expected_finish_s(self, topology: Topology) -> Mapping[str, float]:
        """Per agent, seconds from the request's start to its expected end; agents of unmeasured models are absent."""
        finish: dict[str, float] = {}
        for agent in topology.agents.values():
            run_s = self._run_s.get(agent.model)
            if run_s is not None and all(precursor in finish for precursor in agent.precursors):
                finish[agent.id] = run_s + max((finish[p] for p in agent.precursors), default=0.0)
        return finish


def _blend(means: dict[str, float], model: str, seconds: float) -> None:
    before = means.get(model, seconds)
    means[model] = before + _WEIGHT * (seconds - before)
