"""Lines whose model is a pool go to the pool, all of them together; the others are chat completions."""

from collections.abc import AsyncIterator, Mapping

from shell_router.api.batch.lines import BatchLine, Keep, LineRunner


class SplitLines:
    """A LineRunner of `chats` and, by the names that lines give as their model, of `pools`.

    A pool plans all its lines at once, so it begins when the batch's other lines are answered.
    """

    def __init__(self, chats: LineRunner, pools: Mapping[str, LineRunner]) -> None:
        self._chats = chats
        self._pools = pools

    async def run(self, tenant: str, lines: AsyncIterator[BatchLine], keep: Keep) -> None:
        """LineRunner.run."""
        pooled: dict[str, list[BatchLine]] = {}

        async def others() -> AsyncIterator[BatchLine]:
            async for line in lines:
                model = line.body.get("model")
                if isinstance(model, str) and model in self._pools:
                    pooled.setdefault(model, []).append(line)
                else:
                    yield line

        await self._chats.run(tenant, others(), keep)
        for name, group in pooled.items():
            await self._pools[name].run(tenant, _each(group), keep)


async def _each(lines: list[BatchLine]) -> AsyncIterator[BatchLine]:
    for line in lines:
        yield line
