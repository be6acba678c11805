"""A simulated prefill-decode pair, behind the same contract as a real one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from shell_router.core.generation import DEFAULT_MAX_NEW_TOKENS, Finish, Generation, Prefilled, Tokens
from shell_router.engines.simulated.costs import PairCosts
from shell_router.engines.simulated.decode import DecodeEngine
from shell_router.engines.simulated.prefill import PrefillEngine
from shell_router.engines.simulated.processor import Processor
from shell_router.engines.simulated.room import Writing
from shell_router.engines.simulated.text import Written
from shell_router.scheduling.engine_state import Reported


class SimulatedPair:
    """See `Engine`. `write` says what a request will answer; it is cut at the request's `max_new_tokens`.

    As in SGLang's disaggregation, a request first claims its room on the decode side, then is prefilled, then its KV
    goes over, and the first token comes with it. Where no processors are given, each engine has its own. With
    `prefill_first` decode stands still while there is something to prefill, as in one engine that does both. `beside`
    does what tokens cost beside the engine, and what hands KV over, where these are not free: on one machine's CPU.

    What decode takes back comes back from host memory, as fast as KV goes over, as on SGLang's decode servers
    (`--disaggregation-decode-retraction-backup`). In `one_engine` it is prefilled anew, with what was written.
    """

    def __init__(
        self,
        costs: PairCosts,
        write: Callable[[Generation], Written],
        *,
        prefill_processor: Processor | None = None,
        decode_processor: Processor | None = None,
        prefill_first: bool = False,
        one_engine: bool = False,
        beside: Processor | None = None,
    ) -> None:
        self._transfer = costs.transfer
        self._room = costs.decode.cache_tokens
        self._write = write
        self._beside = beside
        self._one_engine = one_engine
        decodes = decode_processor or Processor()
        held = decodes if prefill_first else None
        self.prefilling = PrefillEngine(costs.prefill, prefill_processor or Processor(), held)
        self.decoding = DecodeEngine(costs.decode, decodes, beside)

    def reported(self) -> Reported:
        """What the pair says of itself, as an engine's `/v1/loads`."""
        taken, (running, waiting) = self.decoding.taken_tokens, self.decoding.requests
        return Reported(taken / self._room, taken + self.decoding.waiting_tokens, running, waiting)

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        return Prefilled(len(request.input_ids), await self.prefilling.prefill(request.input_ids))

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        output, prompt = self._write(request), len(request.input_ids)
        limit = request.sampling.get("max_new_tokens")
        wanted = min(len(output), DEFAULT_MAX_NEW_TOKENS if limit is None else max(1, limit))
        heard = _Heard()
        writing = Writing(prompt, wanted, request.sampling.get("stream_interval") or 1, heard.tell, heard.lose)
        await self.decoding.admit(writing)
        try:
            cached = await self.prefilling.prefill(request.input_ids)
            await self._hand_over(self._transfer.seconds(prompt))
            self.decoding.join(writing)
            told = 0
            while told < wanted:
                if (now := await heard.more_than(told)) == told:
                    await self._go_on(writing, (*request.input_ids, *output.part(0, writing.written)[0]))
                    continue
                logprobs = (output.logprob,) * (now - told) if request.logprobs else ()
                yield Tokens(*output.part(told, now), logprobs)
                told = now
            yield Finish("stop" if wanted == len(output) else "length", prompt, wanted, cached)
        finally:
            self.decoding.leave(writing)

    async def _hand_over(self, seconds: float) -> None:
        await (asyncio.sleep(seconds) if self._beside is None else self._beside.work(seconds))

    async def _go_on(self, writing: Writing, ids: Sequence[int]) -> None:
        """With what was taken back: its room again, then its KV, which is that of `ids`."""
        await self.decoding.admit(writing)
        if self._one_engine:
            await self.prefilling.prefill(ids)
            self.decoding.join(writing)
        else:
            await self._hand_over(len(ids) * self._transfer.token_s)
            self.decoding.join(writing, tokens=0)


class _Heard:
    """How many tokens a sequence has written, whether it lost its room, and whoever waits for either."""

    __slots__ = ("_lost", "_news", "_written")

    def __init__(self) -> None:
        self._written = 0
        self._lost = False
        self._news: asyncio.Future[None] | None = None

    def tell(self, written: int) -> None:
        self._written = written
        self._wake()

    def lose(self) -> None:
        self._lost = True
        self._wake()

    async def more_than(self, told: int) -> int:
        """The tokens written so far; `told` itself where its room was taken back."""
        if self._written <= told and not self._lost:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if self._written <= told:
            self._lost = False
        return self._written

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
