"""Several simulated pairs of one model, behind one engine."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from shell_router.core.generation import Finish, Generation, Prefilled, Tokens
from shell_router.engines.simulated import SimulatedPair


class Fleet:
    """See `Engine`. The pair with the fewest requests takes the next; those of one affinity stay with the first's."""

    def __init__(self, alias: str, pairs: Sequence[SimulatedPair]) -> None:
        self.alias = alias
        self.pairs = pairs
        self._home: dict[str, int] = {}
        self._running = [0] * len(pairs)

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        with self._taken(request) as pair:
            return await pair.prefill(request)

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        with self._taken(request) as pair:
            async with aclosing(pair.generate(request)) as stream:
                async for item in stream:
                    yield item

    @contextmanager
    def _taken(self, request: Generation) -> Iterator[SimulatedPair]:
        fewest = min(range(len(self.pairs)), key=self._running.__getitem__)
        place = self._home.setdefault(request.affinity or request.rid, fewest)
        self._running[place] += 1
        try:
            yield self.pairs[place]
        finally:
            self._running[place] -= 1
