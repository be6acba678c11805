"""How long things take on each model, as this router has measured them, and how much agents write there."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TypeVar

from shell_router.scheduling import MeasuredUpdates, UpdateCost
from shell_router.topology import Topology

K = TypeVar("K")

_KEPT_PLACES = 10_000  # agents of topologies; those heard of longest ago are forgotten first
_WEIGHT = 0.2  # of the newest measurement: a change of load shows after about five


class Pace:
    """Exponential means per model alias, or what comes near them; absent until first measured."""

    def __init__(self) -> None:
        self._run_s: dict[str, float] = {}
        self._updates: defaultdict[str, MeasuredUpdates] = defaultdict(MeasuredUpdates)
        self._token_s: dict[str, float] = {}
        self._growing: Counter[str] = Counter()
        self._output_tokens: dict[str, float] = {}
        self._place_tokens: OrderedDict[tuple[str, str | None, str | None], float] = OrderedDict()

    def observe_run(self, model: str, seconds: float) -> None:
        """An agent of `model` took this long from its complete prompt to its end."""
        _blend(self._run_s, model, seconds)

    def observe_update(self, model: str, new_tokens: int, seconds: float) -> None:
        """A prefill-only update on `model`, of so many tokens that were not cached, took this long."""
        self._updates[model].add(new_tokens, seconds)

    def update_cost(self, model: str) -> UpdateCost | None:
        """What a prefill-only update costs."""
        return self._updates[model].cost

    def observe_decode(self, model: str, tokens: int, seconds: float) -> None:
        """An agent of `model` wrote so many tokens after its first, in so many seconds."""
        if tokens > 0:
            _blend(self._token_s, model, seconds / tokens)

    def token_s(self, model: str) -> float | None:
        """Mean seconds between a sequence's tokens."""
        return self._token_s.get(model)

    def observe_output(self, model: str, topology: str | None, agent: str | None, tokens: int) -> None:
        """The agent of this topology wrote so many tokens with `model`, to its end."""
        _blend(self._output_tokens, model, tokens)
        place = (model, topology, agent)
        _blend(self._place_tokens, place, tokens)
        self._place_tokens.move_to_end(place)
        if len(self._place_tokens) > _KEPT_PLACES:
            self._place_tokens.popitem(last=False)

    def output_tokens(self, model: str, topology: str | None, agent: str | None) -> float | None:
        """Mean tokens that this agent of this topology writes with `model`; any agent, where it has not written yet."""
        return self._place_tokens.get((model, topology, agent), self._output_tokens.get(model))

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


def _blend(means: MutableMapping[K, float], key: K, newest: float) -> None:
    before = means.get(key, newest)
    means[key] = before + _WEIGHT * (newest - before)
