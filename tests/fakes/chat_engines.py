"""A scripted pair that answers chats itself, as SGLang does, with a real client in front."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from benchmarks.scripted.http import Exchange
from benchmarks.scripted.server import BadRequest, BootstrapRooms, ScriptedServer, ScriptedSettings
from shell_router.engines.address import PairAddress
from shell_router.engines.native_body import NativeRules
from shell_router.engines.sglang import SglangPair
from tests.fakes.scripted_pair import LIMITS, NEVER_OPEN, ONCE, until

Message = Mapping[str, Any]


def call(name: str, arguments: Mapping[str, Any], id: str = "call_1") -> Message:
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def calls_first_tool(body: Mapping[str, Any]) -> Message:
    """Call the first tool with a city; say what its result was."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": f"It says: {last['content']}"}
    if body.get("tools"):
        return call(body["tools"][0]["function"]["name"], {"city": "Paris"})
    return {"role": "assistant", "content": "no tools"}


@dataclass
class ChatScript:
    """The script of both servers.

    `say` makes the answer to a body; a stream waits at `gate` before its last chunks.
    """

    say: Callable[[Mapping[str, Any]], Message] = calls_first_tool
    tool_parser: str | None = "qwen25"
    gate: asyncio.Event | None = None


class ChatServer(ScriptedServer):
    """Answers /v1/chat/completions and /v1/completions, too. `chats` are the running ones by their
    `rid`.
    """

    def __init__(
        self, settings: ScriptedSettings, script: ChatScript, rooms: BootstrapRooms
    ) -> None:
        super().__init__(settings, rooms=rooms)
        self.script = script
        self.chats: dict[str, Exchange] = {}
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes[b"/v1/chat/completions"] = self._chat
        self._routes[b"/v1/completions"] = self._chat
        self._routes[b"/server_info"] = lambda exchange: exchange.answer_json(
            {"version": "0.5.23", "tool_call_parser": script.tool_parser, "internal_states": [{}]}
        )

    def _chat(self, exchange: Exchange) -> None:
        body = orjson.loads(exchange.body)
        self.sent.append((exchange.path.decode(), body))
        room, rooms = body.get("bootstrap_room"), self._rooms
        if not isinstance(room, int):
            raise BadRequest("Disaggregated request received without bootstrap room id.")
        assert rooms is not None
        self.chats[body["rid"]] = exchange
        exchange.gone = lambda: self._end(body["rid"])
        if self.settings.role == "prefill":
            rooms.arrive(room, 0)
            self._write_whole_chat(body, {"role": "assistant", "content": "f"})
        else:
            rooms.wait(room, lambda _: self._answer_chat(body))

    def _end(self, rid: str) -> None:
        self.chats.pop(rid, None)

    def _abort(self, exchange: Exchange) -> None:
        self._end(str(orjson.loads(exchange.body).get("rid")))
        super()._abort(exchange)

    def _answer_chat(self, body: dict[str, Any]) -> None:
        if "prompt" in body:
            message: Message = {"role": "assistant", "content": f"after {body['prompt']}"}
        else:
            message = self.script.say(body)
        if not body.get("stream"):
            self._write_whole_chat(body, message)
            return
        task = asyncio.get_running_loop().create_task(self._stream(body, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _base(self, body: Mapping[str, Any], kind: str) -> dict[str, Any]:
        return {"id": body["rid"], "object": kind, "created": 1, "model": body["model"]}

    def _write_whole_chat(self, body: Mapping[str, Any], message: Message) -> None:
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": reason,
        }
        if "prompt" in body:
            choice = {
                "index": 0,
                "text": message["content"],
                "logprobs": None,
                "finish_reason": reason,
            }
        answer = self._base(body, "chat.completion") | {"choices": [choice], "usage": USAGE}
        if (exchange := self.chats.pop(body["rid"], None)) is not None:
            exchange.answer_json(answer)

    async def _stream(self, body: dict[str, Any], message: Message) -> None:
        base = self._base(body, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for place, one in enumerate(message.get("tool_calls") or ()):
            function, begun = one["function"], {"index": place, "id": one["id"], "type": "function"}
            deltas.append(
                {"tool_calls": [{**begun, "function": {"name": function["name"], "arguments": ""}}]}
            )
            pieces = [
                {"index": place, "function": {"arguments": piece}}
                for piece in function["arguments"]
            ]
            deltas += [{"tool_calls": [piece]} for piece in pieces]
        deltas += [
            {"content": word} for word in re.findall(r"\S+\s*", message.get("content") or "")
        ]
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        for delta in deltas:
            self._write_chunk(
                body, {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            )
        if self.script.gate is not None:
            await self.script.gate.wait()
        self._write_chunk(
            body, {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        )
        if (body.get("stream_options") or {}).get("include_usage"):
            self._write_chunk(body, {**base, "choices": [], "usage": USAGE})
        if (exchange := self.chats.pop(body["rid"], None)) is not None:
            exchange.write([b"data: [DONE]\n\n"], last=True)

    def _write_chunk(self, body: Mapping[str, Any], chunk: dict[str, Any]) -> None:
        if (exchange := self.chats.get(body["rid"])) is not None:
            exchange.write([b"data: " + orjson.dumps(chunk) + b"\n\n"], last=False)


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


@dataclass
class ChatPair:
    """The client under test and its servers."""

    script: ChatScript
    prefill: ChatServer
    decode: ChatServer
    pair: SglangPair = field(init=False)

    async def idle(self) -> None:
        """Return once no chat runs on either; fails after half a minute."""
        await until(lambda: not (self.prefill.chats or self.decode.chats))


@asynccontextmanager
async def chat_pair(script: ChatScript | None = None) -> AsyncIterator[ChatPair]:
    """A pair whose client has asked the servers what they are."""
    script, rooms = script or ChatScript(), BootstrapRooms()
    prefill = ChatServer(ScriptedSettings(role="prefill"), script, rooms)
    async with prefill, ChatServer(ScriptedSettings(role="decode"), script, rooms) as decode:
        at = ChatPair(script, prefill, decode)
        address = PairAddress(prefill.url, decode.url, "127.0.0.1", 8998)
        at.pair = SglangPair(
            address, limits=LIMITS, retries=ONCE, breaker=NEVER_OPEN, rules=NativeRules(1000)
        )
        await at.pair.fleet.probe()
        yield at
        await at.pair.aclose()
