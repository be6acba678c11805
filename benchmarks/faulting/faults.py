"""What is broken, one function each."""

import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from faulting.client import Request
from faulting.engines import CONTEXT, PREFILL_CONTEXT, SHORT_DECODE_CONTEXT
from faulting.scene import Outcome, Scene

SHORT_PROMPT, LONG_PROMPT = 60, 12000
NEW_TOKENS = 4000
"""Decoding them takes much longer than anything that is measured."""
TOO_LONG_PROMPT = PREFILL_CONTEXT + 1000
USUAL_STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What strikes, and what the routers and the pair are set to for it.

    `stall_s` is our router's limit for a silent engine; `refusing` puts that server before prefill. Where a server is
    killed, `away` names the row of one more request, sent before the server is started again.
    """

    strike: Callable[[Scene], Awaitable[Outcome]]
    stall_s: float = USUAL_STALL_S
    decode_context: int = CONTEXT
    refusing: bool = False
    away: str | None = None


async def _prefill_refuses(scene: Scene) -> Outcome:
    scene.refusing.refuses = True
    return await _met(scene, SHORT_PROMPT)


async def _prefill_refuses_whole(scene: Scene) -> Outcome:
    scene.refusing.refuses = True
    return await _met(scene, SHORT_PROMPT, stream=False)


async def _too_long_for_prefill(scene: Scene) -> Outcome:
    return await _met(scene, TOO_LONG_PROMPT)


async def _too_long_for_decode(scene: Scene) -> Outcome:
    return await _met(scene, LONG_PROMPT)


async def meets_what_is_away(scene: Scene) -> Outcome:
    """Of a request sent after the one that met the fault, whose remains are cleared away first."""
    await scene.engines.clear()
    return await _met(scene, SHORT_PROMPT)


async def _met(scene: Scene, prompt_tokens: int, *, stream: bool = True) -> Outcome:
    """Of a request that meets a fault which is already there."""
    scene.begin()
    return await scene.told(scene.client.ask(prompt_tokens, NEW_TOKENS, stream=stream))


async def _aborted_before_first_token(scene: Scene) -> Outcome:
    request = await _in_prefill(scene)
    scene.begin()
    await scene.engines.abort_all(scene.engines.decode)
    return await scene.told(request)


async def _prefill_killed(scene: Scene) -> Outcome:
    request = await _in_prefill(scene)
    scene.begin()
    scene.engines.prefill.signal(signal.SIGKILL)
    return await scene.told(request)


async def _client_leaves_during_prefill(scene: Scene) -> Outcome:
    request = await _in_prefill(scene)
    scene.begin()
    return await scene.left(request)


async def _client_leaves_during_decode(scene: Scene) -> Outcome:
    request = await _in_decode(scene)
    scene.begin()
    return await scene.left(request)


async def _decode_stalled(scene: Scene) -> Outcome:
    request = await _in_decode(scene)
    scene.begin()
    scene.engines.stall(scene.engines.decode)
    return await scene.told(request)


async def _decode_killed(scene: Scene) -> Outcome:
    request = await _in_decode(scene)
    scene.begin()
    scene.engines.decode.signal(signal.SIGKILL)
    return await scene.told(request)


async def _in_prefill(scene: Scene) -> Request:
    request = scene.client.ask(LONG_PROMPT, NEW_TOKENS)
    await scene.engines.prefilling()
    return request


async def _in_decode(scene: Scene) -> Request:
    request = scene.client.ask(SHORT_PROMPT, NEW_TOKENS)
    await request.streaming()
    return request


FAULTS: Mapping[str, Fault] = {
    "prefill answers 400": Fault(_prefill_refuses, refusing=True),
    "prefill answers 400, no stream": Fault(_prefill_refuses_whole, refusing=True),
    "prompt too long for prefill": Fault(_too_long_for_prefill),
    "prompt too long for decode": Fault(_too_long_for_decode, decode_context=SHORT_DECODE_CONTEXT),
    "aborted before the first token": Fault(_aborted_before_first_token),
    "client leaves during prefill": Fault(_client_leaves_during_prefill),
    "client leaves during decode": Fault(_client_leaves_during_decode),
    "decode stalled": Fault(_decode_stalled, stall_s=2.0),
    "prefill killed during prefill": Fault(_prefill_killed, away="prefill away, then restarted"),
    "decode killed mid-stream": Fault(_decode_killed, away="decode away, then restarted"),
}
