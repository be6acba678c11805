"""A fast scripted engine: SGLang's wire format with no model behind it, for load tests, benchmarks
and faults.

python -m benchmarks.scripted.server --prefill-port 8101 --decode-port 8102
"""

import argparse
import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, replace
from types import TracebackType
from typing import Self

import orjson
import uvloop

from benchmarks.scripted.http import Exchange, HttpProtocol
from benchmarks.scripted.run import (
    DEFAULT_SETTINGS,
    ID_BYTES,
    BadRequest,
    Fault,
    ScriptedMemory,
    ScriptedRun,
    ScriptedSettings,
    read_script,
)
from shell_router.standins.prefix_cache import PrefixCache

__all__ = ["BootstrapRooms", "Fault", "ScriptedPair", "ScriptedServer", "ScriptedSettings"]

_MOST_ROOMS = 65536
"""Rooms kept for a decode that has not come; older ones are those of requests that were abandoned.
"""


class BootstrapRooms:
    """Decode waits here for its prefill, as with a real transfer."""

    def __init__(self) -> None:
        self._arrived: OrderedDict[int, int] = OrderedDict()
        self._waiting: dict[int, Callable[[int], None]] = {}

    def arrive(self, room: int, cached_tokens: int) -> None:
        """The room's prefill has ended."""
        waiting = self._waiting.pop(room, None)
        if waiting is None:
            self._arrived[room] = cached_tokens
            if len(self._arrived) > _MOST_ROOMS:
                self._arrived.popitem(last=False)
        else:
            waiting(cached_tokens)

    def wait(self, room: int, proceed: Callable[[int], None]) -> None:
        """Call `proceed` with the prefill's cached tokens once it has ended, at once if it has."""
        cached_tokens = self._arrived.pop(room, None)
        if cached_tokens is None:
            self._waiting[room] = proceed
        else:
            proceed(cached_tokens)

    def leave(self, room: int) -> None:
        """Its decode has gone."""
        self._waiting.pop(room, None)
        self._arrived.pop(room, None)


class ScriptedServer:
    """One scripted server, of the role its settings name. `settings` may be replaced while it runs.

    With `rooms`, shared by a prefill and a decode server, decode starts when its prefill has ended;
    without, a decode server takes the prefill's delay upon itself. `requests` counts those to
    generate or to prefill, `bodies` has the last of them, `log_bodies` at most, and `aborted` the
    rids that were asked to be aborted.
    """

    def __init__(
        self, settings: ScriptedSettings = DEFAULT_SETTINGS, *, rooms: BootstrapRooms | None = None
    ) -> None:
        self.settings = settings
        self.requests = 0
        self.bodies: list[bytes] = []
        self.aborted: list[str] = []
        self._runs: dict[str, ScriptedRun] = {}
        self._rooms = rooms
        self._cache = PrefixCache(settings.cache_tokens * ID_BYTES)
        self.memory = ScriptedMemory(lambda: self.settings, lambda: bool(self._runs), self._close)
        self._connections: set[HttpProtocol] = set()
        self._server: asyncio.Server | None = None
        self._routes: dict[bytes, Callable[[Exchange], None]] = {
            b"/generate": self._generate,
            b"/prefill_only": self._prefill_only,
            b"/abort_request": self._abort,
            b"/script": self._script,
            b"/health": self._health,
            b"/server_info": self._server_info,
            b"/model_info": self._model_info,
            b"/v1/loads": self._loads,
            b"/metrics": self._metrics,
            b"/flush_cache": self.memory.flush,
            b"/release_memory_occupation": self.memory.release,
            b"/resume_memory_occupation": self.memory.resume,
            b"/update_weights_from_disk": self.memory.read_weights,
            b"/update_weight_version": self.memory.set_version,
        }

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen on `port`, or on a free one when it is 0."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: HttpProtocol(self._serve, lambda: self.settings.cut_bytes, self._connections),
            host,
            port,
            backlog=4096,
        )

    async def stop(self) -> None:
        """Stop listening and break every connection."""
        assert self._server is not None
        self._close()
        await self._server.wait_closed()

    def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in tuple(self._connections):
            connection.drop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
        return len(self._runs)

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

    def _script(self, exchange: Exchange) -> None:
        self.settings = replace(self.settings, **read_script(orjson.loads(exchange.body)))
        exchange.answer_json(asdict(self.settings))

    def _server_info(self, exchange: Exchange) -> None:
        info = {
            "version": "scripted",
            "disaggregation_mode": self.settings.role,
            "device": self.settings.device,
            "enable_memory_saver": self.settings.memory_saver,
            "enable_weights_cpu_backup": self.settings.cpu_backup,
            "disable_overlap_schedule": True,
            **self.settings.server_info,
        }
        exchange.answer_json(
            {**info, "context_length": self.settings.context_length, "internal_states": [{}]}
        )

    def _model_info(self, exchange: Exchange) -> None:
        info = {
            "model_path": self.memory.model_path,
            "tokenizer_path": "scripted",
            "is_generation": True,
        }
        exchange.answer_json(
            {
                **info,
                "disaggregation_mode": self.settings.role,
                "weight_version": self.memory.version,
            }
        )

    def _health(self, exchange: Exchange) -> None:
        """As SGLang's, whose server generates where it is idle, unless a variable says
        otherwise."""
        generates = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION") != "false"
        if not self.memory.warm:
            exchange.answer(503, b"")
        elif self._runs or not generates or self.memory.computes():
            exchange.answer(200, b"")

    def _loads(self, exchange: Exchange) -> None:
        used = sum(run.prompt_tokens + run.sent for run in self._runs.values())
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(self._runs),
            "num_waiting_reqs": 0,
            "num_used_tokens": used,
            "max_total_num_tokens": 1_000_000,
            "token_usage": used / 1_000_000,
            "cache_hit_rate": 0.0,
        }
        exchange.answer_json({"version": "scripted", "loads": [load]})

    def _metrics(self, exchange: Exchange) -> None:
        lines = f"# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs {len(self._runs)}\n"
        exchange.answer(200, lines.encode(), b"text/plain; version=0.0.4")

    def _generate(self, exchange: Exchange) -> None:
        """In this server's role."""
        run = self._accept(exchange)
        if run is None:
            return
        if self.settings.role == "null":
            run.room = None
        elif not isinstance(run.room, int):
            raise BadRequest(
                "Invalid request: Disaggregated request received without bootstrap room id. "
                f"req.rid={run.rid!r}"
            )
        if not self._enter(run):
            return
        if self.settings.role != "decode":
            self._prefill(run)
        elif self._rooms is None:
            self._after(self._prefill_s(run), run, self._write)
        else:
            self._rooms.wait(run.room, lambda cached_tokens: self._arrived(run, cached_tokens))

    def _prefill_only(self, exchange: Exchange) -> None:
        if self.settings.role == "decode" or "route" not in self.settings.warms:
            exchange.answer_json({"detail": "Not Found"}, 404)
            return
        run = self._accept(exchange)
        if run is not None:
            run.room = None
            if self._enter(run):
                run.first_token_only()
                self._prefill(run)

    def _abort(self, exchange: Exchange) -> None:
        """End the run of that rid, if there is one, with an abort as its finish."""
        rid = str(orjson.loads(exchange.body).get("rid") or "")
        self.aborted.append(rid)
        run = self._runs.get(rid)
        if run is not None:
            self._leave(run)
            if run.stream:
                run.exchange.write([run.framed(run.aborted()), run.done_mark()], last=True)
            else:
                run.exchange.answer_json(run.aborted())
        exchange.answer(200, b"")

    def _accept(self, exchange: Exchange) -> ScriptedRun | None:
        """The run of a good request that no fault takes at its start."""
        if not self.memory.computes():
            return None
        self.requests += 1
        if self.settings.log_bodies:
            self.bodies.append(exchange.body)
            del self.bodies[: -self.settings.log_bodies]
        fault = self._next_fault()
        if fault is not None and fault.kind == "refuse":
            exchange.drop()
            return None
        if fault is not None and fault.kind == "status":
            exchange.answer_json({"error": {"message": fault.message}}, fault.status)
            return None
        body = orjson.loads(exchange.body)
        if not isinstance(body, dict):
            raise BadRequest("The body must be a JSON object.")
        run = ScriptedRun(exchange, body, self.settings)
        run.fault = fault
        return run

    def _next_fault(self) -> Fault | None:
        fault = self.settings.fault
        if fault is not None and fault.times is not None:
            left = fault.times - 1
            self.settings = replace(
                self.settings, fault=replace(fault, times=left) if left else None
            )
        return fault

    def _enter(self, run: ScriptedRun) -> bool:
        """False for one whose adapter is not loaded; a stream gets that as an event, as from
        SGLang.
        """
        known = self.settings.adapters
        if run.adapter is not None and run.adapter not in known:
            words = (
                f"Got LoRA adapter that has never been loaded: {run.adapter}\n"
                f"All loaded adapters: {list(known)}."
            )
            if not run.stream:
                raise BadRequest(words)
            refusal = run.framed(
                {"error": {"message": words, "type": "invalid_request_error", "code": 400}}
            )
            run.exchange.write([refusal, run.done_mark()], last=True)
            return False
        self._runs[run.rid] = run
        run.exchange.gone = lambda: self._leave(run)
        return True

    def _leave(self, run: ScriptedRun) -> None:
        run.ended = True
        if self._runs.get(run.rid) is run:
            del self._runs[run.rid]
        if self._rooms is not None and run.room is not None and self.settings.role == "decode":
            self._rooms.leave(run.room)

    def _prefill_s(self, run: ScriptedRun) -> float:
        uncached = run.prompt_tokens - run.cached_tokens
        return self.settings.prefill_s + self.settings.prefill_token_s * uncached

    def _after(self, delay_s: float, run: ScriptedRun, step: Callable[[ScriptedRun], None]) -> None:
        if delay_s <= 0:
            step(run)
        else:
            asyncio.get_running_loop().call_later(delay_s, self._step, run, step)

    def _step(self, run: ScriptedRun, step: Callable[[ScriptedRun], None]) -> None:
        if not run.ended:
            step(run)

    def _prefill(self, run: ScriptedRun) -> None:
        matched = self._cache.match(run.prompt, run.adapter) // ID_BYTES
        # as in SGLang, the last token is always computed, and so are tokens to be scored
        run.cached_tokens = min(matched, run.prompt_tokens - 1, run.scored_from)
        if self.settings.role == "prefill":
            run.first_token_only()
        self._after(self._prefill_s(run), run, self._answer_prefill)

    def _answer_prefill(self, run: ScriptedRun) -> None:
        self._cache.add(run.prompt, run.adapter)
        if run.fault is None and self._rooms is not None and run.room is not None:
            self._rooms.arrive(run.room, run.cached_tokens)
        self._write(run)

    def _arrived(self, run: ScriptedRun, cached_tokens: int) -> None:
        run.cached_tokens = cached_tokens
        self._write(run)

    def _write(self, run: ScriptedRun) -> None:
        # a prefill server's one token comes with the prefill
        token_s = 0.0 if self.settings.role == "prefill" else self.settings.token_s
        if not run.stream:
            self._after(token_s * len(run.ids), run, self._write_whole)
        elif token_s <= 0:
            self._write_tokens(run, len(run.ids))
        else:
            self._pace(run, asyncio.get_running_loop().time())

    def _pace(self, run: ScriptedRun, start_s: float) -> None:
        """Write each event when its last token is due, at a multiple of `token_s`, however long the
        writing takes.
        """
        if run.ended:
            return
        self._write_tokens(run, run.due)
        if not run.ended:
            due_s = start_s + (run.due - 1) * self.settings.token_s
            asyncio.get_running_loop().call_at(due_s, self._pace, run, start_s)

    def _write_tokens(self, run: ScriptedRun, until: int) -> None:
        fault = run.fault
        if fault is not None and fault.after_tokens < max(until, 1):
            if run.strike(fault):
                self._leave(run)
            return
        events = run.events(until)
        last = until >= len(run.ids)
        if last:
            events.append(run.done_mark())
            self._leave(run)
        run.exchange.write(events, last=last)

    def _write_whole(self, run: ScriptedRun) -> None:
        if run.fault is None or run.fault.kind != "stall":
            self._leave(run)
            run.answer_whole()


class ScriptedPair:
    """A scripted prefill and a scripted decode server that meet in shared rooms, in this
    process."""

    def __init__(self, settings: ScriptedSettings = DEFAULT_SETTINGS) -> None:
        rooms = BootstrapRooms()
        self.prefill = ScriptedServer(replace(settings, role="prefill"), rooms=rooms)
        self.decode = ScriptedServer(replace(settings, role="decode"), rooms=rooms)

    async def __aenter__(self) -> Self:
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.prefill.stop()
        await self.decode.stop()


async def serve(
    prefill_port: int | None, decode_port: int | None, settings: ScriptedSettings
) -> None:
    """Serve the given ports, each a server of its role, until cancelled."""
    rooms = BootstrapRooms() if prefill_port is not None and decode_port is not None else None
    servers = []
    for role, port in (("prefill", prefill_port), ("decode", decode_port)):
        if port is not None:
            server = ScriptedServer(
                replace(settings, role="prefill" if role == "prefill" else "decode"), rooms=rooms
            )
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
    parser = argparse.ArgumentParser(
        description="A scripted engine that speaks SGLang's native wire format."
    )
    parser.add_argument(
        "--prefill-port", type=int, help="serve the prefill role on this port (0: a free one)"
    )
    parser.add_argument(
        "--decode-port", type=int, help="serve the decode role on this port (0: a free one)"
    )
    parser.add_argument(
        "--script", default="{}", help="settings as JSON, e.g. '{\"token_s\": 0.01}'"
    )
    arguments = parser.parse_args()
    if arguments.prefill_port is None and arguments.decode_port is None:
        parser.error("give --prefill-port, --decode-port, or both")
    settings = ScriptedSettings(**read_script(orjson.loads(arguments.script)))
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(arguments.prefill_port, arguments.decode_port, settings))


if __name__ == "__main__":
    main()
