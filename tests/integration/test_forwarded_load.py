"""What forwarded requests count for on decode: expected tokens before they are written, reported
ones then.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest

from benchmarks.scripted.http import Exchange
from benchmarks.scripted.server import ScriptedServer, ScriptedSettings
from shell_router.core.engine import Hints
from shell_router.engines.address import PairAddress
from shell_router.engines.native_body import NativeRules
from shell_router.engines.sglang import SglangPair
from shell_router.routing.dispatcher import SchedulingSettings, TrackedEngine
from shell_router.routing.queue import QueueSettings
from tests.fakes.chat_engines import chat_pair
from tests.fakes.scripted_pair import LIMITS

QUEUE = QueueSettings("least_attained", max_tokens=100_000)


class BatchServer(ScriptedServer):
    """Answers batches as SGLang does: request k of a batch writes k + 1 tokens."""

    def __init__(self, settings: ScriptedSettings) -> None:
        super().__init__(settings)
        self._routes[b"/generate"] = self._batch

    def _batch(self, exchange: Exchange) -> None:
        body = orjson.loads(exchange.body)
        last = range(len(body["input_ids"]))
        if not body.get("stream"):
            exchange.answer_json([self._output(place, place + 1, ended=True) for place in last])
            return
        events = [
            self._output(place, n + 1, ended=n == place) | {"index": place}
            for n in last
            for place in last[n:]
        ]
        exchange.write([b"data: %b\n\n" % orjson.dumps(event) for event in events], last=False)
        exchange.write([b"data: [DONE]\n\n"], last=True)

    @staticmethod
    def _output(place: int, written: int, *, ended: bool) -> dict[str, Any]:
        reason = {"type": "length", "length": written} if ended else None
        meta = {
            "id": f"r_{place}",
            "finish_reason": reason,
            "completion_tokens": written,
            "cached_tokens": 0,
        }
        return {"text": '"completion_tokens": 9' * written, "meta_info": meta}


@asynccontextmanager
async def batches(settings: ScriptedSettings, rules: NativeRules) -> AsyncIterator[SglangPair]:
    async with AsyncExitStack() as stack:
        prefill, decode = [
            await stack.enter_async_context(BatchServer(replace(settings, role=role)))  # type: ignore[arg-type]
            for role in ("prefill", "decode")
        ]
        address = PairAddress(prefill.url, decode.url, "127.0.0.1", 8998)
        pair = SglangPair(
            address, limits=LIMITS, scheduling=SchedulingSettings(queue=QUEUE), rules=rules
        )
        yield pair
        await pair.aclose()


def decode_of(pair: SglangPair) -> TrackedEngine[Any]:
    return pair.fleet.dispatchers["decode"].tracked[0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cut_bytes", [0, 7])
async def test_a_batch_counts_each_of_its_requests_and_what_each_has_written(
    stream: bool, cut_bytes: int
) -> None:
    async with batches(ScriptedSettings(cut_bytes=cut_bytes), NativeRules()) as pair:
        body = {
            "input_ids": [[1], [2], [3]],
            "sampling_params": {"max_new_tokens": 50},
            "stream": stream,
        }
        async with pair.forward("generate", orjson.dumps(body), hints=Hints("ann")) as answer:
            load = decode_of(pair).load
            assert load.running == 3
            async for _ in answer.chunks:
                pass
            assert load.output_tokens == 3 * 50 - 6
            assert load.held_tokens == len(orjson.dumps(body)) // 4 + 6
        assert pair.fleet.dispatchers["decode"].queue.count_attained("ann") >= 2 * 6
        assert (load.running, load.tokens) == (0, 0)


async def test_its_limit_is_expected_until_the_mean_of_what_requests_write_is_below() -> None:
    async with batches(ScriptedSettings(), NativeRules()) as pair:
        expected = []
        for _ in range(60):
            async with pair.forward("generate", b'{"input_ids": [[1]], "stream": true}') as answer:
                expected.append(decode_of(pair).load.output_tokens)
                async for _ in answer.chunks:
                    pass
        assert expected[0] > 100 and expected[-1] <= 1, "each writes one token"


async def test_no_prompt_counts_for_more_than_a_context() -> None:
    async with batches(ScriptedSettings(), NativeRules(context_length=1000)) as pair:
        body = {"input_ids": [[1], [2]], "model": "x" * 40_000}
        async with pair.forward("generate", orjson.dumps(body)) as answer:
            async for _ in answer.chunks:
                pass
            assert decode_of(pair).load.held_tokens == 2000 + 3


@pytest.mark.parametrize("usage", [True, False])
async def test_a_chats_usage_counts_and_without_it_its_events(usage: bool) -> None:
    async with chat_pair() as at:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        body |= {"stream_options": {"include_usage": usage}, "max_tokens": 4096}
        async with at.pair.forward("v1/chat/completions", orjson.dumps(body)) as answer:
            async for _ in answer.chunks:
                pass
            assert decode_of(at.pair).load.held_tokens == len(orjson.dumps(body)) // 4 + 5
