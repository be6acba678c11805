"""What both servers do with a request, and the seam to what they do differently."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shell_router.engines.embedded.adapted_linears import Adapter
from shell_router.engines.embedded.causal_lm import CausalLm
from shell_router.engines.embedded.inflight import Inflight
from shell_router.engines.embedded.output import Output, Piece
from shell_router.engines.embedded.sampler import Draw
from shell_router.engines.embedded.wire import GenerateRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loads:
    """What a server is doing now. Tokens are of KV; `*_total` count since start."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    evictable_tokens: int = 0
    prefill_inflight: int = 0
    decode_prealloc: int = 0
    decode_transfer: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0


class Service(Protocol):
    """One side of the pair. `alive` is false once the model's thread has ended."""

    @property
    def alive(self) -> bool: ...

    def check(self, request: GenerateRequest) -> None:
        """Raise `InvalidRequest` on a request that this side cannot take."""
        ...

    async def work(self, inflight: Inflight) -> None:
        """Put the request's output into its mailbox. Cancelling it frees everything within one step."""
        ...

    async def forget(self, adapter: Adapter) -> None:
        """Let go of all that was computed with an adapter that no request uses any more."""
        ...

    def loads(self) -> Loads: ...

    async def stop(self) -> None: ...


async def output_of(service: Service, inflight: Inflight) -> AsyncGenerator[Sequence[Piece], None]:
    """The request's pieces as they come, to the last; its work never outlives this generator."""
    task = asyncio.create_task(_guarded(service, inflight))
    try:
        finished = False
        while not finished:
            pieces = await inflight.mailbox.take()
            finished = any(piece.finish_reason is not None for piece in pieces)
            yield pieces
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _guarded(service: Service, inflight: Inflight) -> None:
    try:
        await service.work(inflight)
    except Exception as error:
        # The client must hear of it, whatever it is: nobody else reads this task.
        logger.exception("Request %s failed", inflight.request.rid)
        inflight.fail(f"{type(error).__name__}: {error}")


def new_output(request: GenerateRequest, lm: CausalLm) -> Output:
    """The request's output before its first token."""
    stop_ids = request.sampling.stop_token_ids | lm.eos_ids
    draw = Draw(request.sampling, request.input_ids, frozenset() if request.sampling.ignore_eos else stop_ids)
    return Output(draw, lm.tokenizer, max_new_tokens=request.max_new_tokens)
