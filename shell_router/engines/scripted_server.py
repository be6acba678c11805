"""A fast scripted engine: SGLang's wire format with no model behind it, for load tests, benchmarks and faults.

python -m shell_router.engines.scripted_server --prefill-port 8101 --decode-port 8102
"""

import argparse
import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

import orjson
import uvloop

from shell_router.engines.scripting.adapters import ScriptedAdapters
from shell_router.engines.scripting.http import Exchange, HttpProtocol
from shell_router.engines.scripting.player import Player
from shell_router.engines.scripting.rooms import Rooms
from shell_router.engines.scripting.run import BadRequest
from shell_router.engines.scripting.script import DEFAULT_SETTINGS, Fault, ScriptedSettings, read_script

__all__ = ["Fault", "ScriptedPair", "ScriptedServer", "ScriptedSettings"]


class ScriptedServer:
    """One scripted server, of the role its settings name. `settings` may be replaced while it runs.

    With `rooms`, shared by a prefill and a decode server, decode starts when its prefill has ended; without, a decode
    server takes the prefill's delay upon itself. `aborted` lists the rids that were asked to be aborted.
    """

    def __init__(self, settings: ScriptedSettings = DEFAULT_SETTINGS, *, rooms: Rooms | None = None) -> None:
        self.aborted: list[str] = []
        self._player = Player(settings, rooms)
        self._connections: set[HttpProtocol] = set()
        self._server: asyncio.Server | None = None
        self._routes: dict[bytes, Callable[[Exchange], None]] = {
            b"/generate": self._player.generate,
            b"/prefill_only": self._prefill_only,
            b"/abort_request": self._abort,
            b"/script": self._script,
            b"/health": lambda exchange: exchange.answer(200, b""),
            b"/server_info": self._server_info,
            b"/model_info": self._model_info,
            b"/v1/loads": self._loads,
            b"/metrics": self._metrics,
            b"/load_lora_adapter": self.adapters.load,
            b"/unload_lora_adapter": self.adapters.unload,
            b"/v1/models": self.adapters.listed,
        }

    @property
    def settings(self) -> ScriptedSettings:
        """How it behaves; assign to change that for the requests to come."""
        return self._player.settings

    @settings.setter
    def settings(self, settings: ScriptedSettings) -> None:
        self._player.settings = settings

    @property
    def requests(self) -> int:
        """Requests to generate or to prefill that have come in."""
        return self._player.requests

    @property
    def adapters(self) -> ScriptedAdapters:
        """Its adapters."""
        return self._player.adapters

    @property
    def bodies(self) -> tuple[bytes, ...]:
        """The last bodies received, as many as `log_bodies` says."""
        return tuple(self._player.bodies)

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen on `port`, or on a free one when it is 0."""
        self._server = await asyncio.get_running_loop().create_server(self._protocol, host, port, backlog=4096)

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(self._serve, lambda: self.settings.cut_bytes, self._connections)

    async def stop(self) -> None:
        """Stop listening and break every connection."""
        assert self._server is not None
        self._server.close()
        for connection in tuple(self._connections):
            connection.drop()
        await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._player.runs)

    @property
    def connections(self) -> int:
        """Connections that clients hold open."""
        return len(self._connections)

    def _serve(self, exchange: Exchange) -> None:
        route = self._routes.get(exchange.path.partition(b"?")[0])
        if route is None:
            exchange.answer_json({"detail": "Not Found"}, 404)
            return
        try:
            route(exchange)
        except BadRequest as error:
            exchange.answer_json({"error": {"message": str(error)}}, 400)
        except (orjson.JSONDecodeError, TypeError, ValueError) as error:
            exchange.answer_json({"object": "error", "message": str(error), "code": 400}, 400)

    def _abort(self, exchange: Exchange) -> None:
        rid = str(orjson.loads(exchange.body).get("rid") or "")
        self.aborted.append(rid)
        self._player.abort(rid)
        exchange.answer(200, b"")

    def _prefill_only(self, exchange: Exchange) -> None:
        if self.settings.role == "prefill" and "route" in self.settings.warms:
            self._player.prefill_only(exchange)
        else:
            exchange.answer_json({"detail": "Not Found"}, 404)

    def _script(self, exchange: Exchange) -> None:
        self.settings = replace(self.settings, **read_script(orjson.loads(exchange.body)))
        exchange.answer_json(asdict(self.settings))

    def _server_info(self, exchange: Exchange) -> None:
        info = {
            "version": "scripted",
            "disaggregation_mode": self.settings.role,
            "enable_priority_scheduling": self.settings.priorities != "none",
            "schedule_low_priority_values_first": self.settings.priorities == "low_first",
            "enable_lora": self.settings.adapter_room > 0,
        }
        exchange.answer_json({**info, "context_length": self.settings.context_length, "internal_states": [{}]})

    def _model_info(self, exchange: Exchange) -> None:
        info = {"model_path": "scripted", "tokenizer_path": "scripted", "is_generation": True}
        exchange.answer_json({**info, "disaggregation_mode": self.settings.role})

    def _loads(self, exchange: Exchange) -> None:
        exchange.answer_json({"version": "scripted", "loads": [self._load()]})

    def _load(self) -> dict[str, Any]:
        used = sum(run.prompt_tokens + run.sent for run in self._player.runs.values())
        return {
            "dp_rank": 0,
            "num_running_reqs": len(self._player.runs),
            "num_waiting_reqs": 0,
            "num_used_tokens": used,
            "max_total_num_tokens": 1_000_000,
            "token_usage": used / 1_000_000,
            "cache_hit_rate": 0.0,
        }

    def _metrics(self, exchange: Exchange) -> None:
        lines = f"# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs {len(self._player.runs)}\n"
        exchange.answer(200, lines.encode(), b"text/plain; version=0.0.4")


class ScriptedPair:
    """A scripted prefill and a scripted decode server that meet in shared rooms, in this process."""

    def __init__(self, settings: ScriptedSettings = DEFAULT_SETTINGS) -> None:
        rooms = Rooms()
        self.prefill = ScriptedServer(replace(settings, role="prefill"), rooms=rooms)
        self.decode = ScriptedServer(replace(settings, role="decode"), rooms=rooms)

    async def __aenter__(self) -> Self:
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.prefill.stop()
        await self.decode.stop()


async def serve(prefill_port: int | None, decode_port: int | None, settings: ScriptedSettings) -> None:
    """Serve the given ports, each a server of its role, until cancelled."""
    rooms = Rooms() if prefill_port is not None and decode_port is not None else None
    servers = []
    for role, port in (("prefill", prefill_port), ("decode", decode_port)):
        if port is not None:
            server = ScriptedServer(replace(settings, role="prefill" if role == "prefill" else "decode"), rooms=rooms)
            await server.start(port)
            print(f"{role} {server.url}", flush=True)
            servers.append(server)
    try:
        await asyncio.Event().wait()
    finally:
        for server in servers:
            await server.stop()


def main() -> None:
    """Run scripted servers from the command line."""
    parser = argparse.ArgumentParser(description="A scripted engine that speaks SGLang's native wire format.")
    parser.add_argument("--prefill-port", type=int, help="serve the prefill role on this port (0: a free one)")
    parser.add_argument("--decode-port", type=int, help="serve the decode role on this port (0: a free one)")
    parser.add_argument("--script", default="{}", help="settings as JSON, e.g. '{\"token_s\": 0.01}'")
    arguments = parser.parse_args()
    if arguments.prefill_port is None and arguments.decode_port is None:
        parser.error("give --prefill-port, --decode-port, or both")
    settings = ScriptedSettings(**read_script(orjson.loads(arguments.script)))
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(arguments.prefill_port, arguments.decode_port, settings))


if __name__ == "__main__":
    main()
