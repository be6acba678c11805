"""Plays the requests of one scripted server: prefill, pace, and the faults of its script."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import orjson

from shell_router.engines.scripting.adapters import LoadedAdapter, ScriptedAdapters
from shell_router.engines.scripting.faults import strike, strike_whole
from shell_router.engines.scripting.http import Exchange
from shell_router.engines.scripting.prefix_cache import PrefixCache
from shell_router.engines.scripting.rooms import Rooms
from shell_router.engines.scripting.run import BadRequest, ScriptedRun
from shell_router.engines.scripting.script import Fault, ScriptedSettings


class Player:
    """Accepts requests and writes their answers. `runs` holds those that have not ended, by rid."""

    def __init__(self, settings: ScriptedSettings, rooms: Rooms | None) -> None:
        self.settings = settings
        self.requests = 0
        self.bodies: deque[bytes] = deque()
        self.runs: dict[str, ScriptedRun] = {}
        self.adapters = ScriptedAdapters(lambda: self.settings)
        self._adapters: dict[ScriptedRun, LoadedAdapter] = {}
        self._rooms = rooms
        self._cache = PrefixCache(settings.cache_prompts)

    def generate(self, exchange: Exchange) -> None:
        """Serve `/generate` in this server's role."""
        run = self._accept(exchange)
        if run is None:
            return
        if not isinstance(run.room, int):
            raise BadRequest(
                f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={run.rid!r}"
            )
        if not self._enter(run):
            return
        if self.settings.role == "prefill":
            self._prefill(run, warms=not run.fake_host or "fake_host" in self.settings.warms)
        elif self._rooms is None:
            self._after(self._prefill_s(run), run, self._write)
        else:
            self._rooms.wait(run.room, lambda cached_tokens: self._arrived(run, cached_tokens))

    def prefill_only(self, exchange: Exchange) -> None:
        """Serve `/prefill_only`."""
        run = self._accept(exchange)
        if run is not None:
            run.room = None
            if self._enter(run):
                self._prefill(run, warms=True)

    def abort(self, rid: str) -> None:
        """End the run of that rid, if there is one, with an abort as its finish."""
        run = self.runs.get(rid)
        if run is None:
            return
        self._leave(run)
        if run.stream:
            run.exchange.write([run.framed(run.aborted()), run.done_mark()], last=True)
        else:
            run.exchange.answer_json(run.aborted())

    def _accept(self, exchange: Exchange) -> ScriptedRun | None:
        """The run of a good request that no fault takes at its start."""
        self.requests += 1
        if self.settings.log_bodies:
            self.bodies.append(exchange.body)
            while len(self.bodies) > self.settings.log_bodies:
                self.bodies.popleft()
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
            self.settings = replace(self.settings, fault=replace(fault, times=left) if left else None)
        return fault

    def _enter(self, run: ScriptedRun) -> bool:
        """False for one whose adapter is not loaded: as SGLang, a stream is told so in an event."""
        try:
            adapter = self.adapters.taken(run.adapter)
        except BadRequest as error:
            if not run.stream:
                raise
            told = run.framed({"error": {"message": str(error), "type": "invalid_request_error", "code": 400}})
            run.exchange.write([told, run.done_mark()], last=True)
            return False
        if adapter is not None:
            self._adapters[run] = adapter
        self.runs[run.rid] = run
        run.exchange.gone = lambda: self._leave(run)
        return True

    def _leave(self, run: ScriptedRun) -> None:
        run.ended = True
        if (adapter := self._adapters.pop(run, None)) is not None:
            adapter.leave()
        if self.runs.get(run.rid) is run:
            del self.runs[run.rid]
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

    def _prefill(self, run: ScriptedRun, *, warms: bool) -> None:
        # as in SGLang, tokens to be scored are computed although they are cached
        run.cached_tokens = min(self._cache_of(run).cached_tokens(run.prompt), run.scored_from)
        run.first_token_only()
        self._after(self._prefill_s(run), run, self._warm_and_answer if warms else self._answer_prefill)

    def _warm_and_answer(self, run: ScriptedRun) -> None:
        self._cache_of(run).insert(run.prompt)
        self._answer_prefill(run)

    def _cache_of(self, run: ScriptedRun) -> PrefixCache:
        """KV of one adapter, and of one load of it, is of no use to another."""
        adapter = self._adapters.get(run)
        return self._cache if adapter is None else adapter.cache

    def _answer_prefill(self, run: ScriptedRun) -> None:
        if run.fault is None and self._rooms is not None and run.room is not None and not run.fake_host:
            self._rooms.arrive(run.room, run.cached_tokens)
        self._write(run)

    def _arrived(self, run: ScriptedRun, cached_tokens: int) -> None:
        run.cached_tokens = cached_tokens
        self._write(run)

    def _write(self, run: ScriptedRun) -> None:
        token_s = self._token_s()
        if not run.stream:
            self._after(token_s * len(run.ids), run, self._write_whole)
        elif token_s <= 0:
            self._write_tokens(run, len(run.ids))
        else:
            self._pace(run, asyncio.get_running_loop().time())

    def _token_s(self) -> float:
        """A prefill server's one token comes with the prefill."""
        return 0.0 if self.settings.role == "prefill" else self.settings.token_s

    def _pace(self, run: ScriptedRun, start_s: float) -> None:
        """Write each event when its last token is due, at a multiple of `token_s`, however long the writing takes."""
        if run.ended:
            return
        self._write_tokens(run, run.due)
        if not run.ended:
            due_s = start_s + (run.due - 1) * self.settings.token_s
            asyncio.get_running_loop().call_at(due_s, self._pace, run, start_s)

    def _write_tokens(self, run: ScriptedRun, until: int) -> None:
        fault = run.fault
        if fault is not None and fault.after_tokens < max(until, 1):
            if strike(run, fault):
                self._leave(run)
            return
        events = run.events(until)
        last = until >= len(run.ids)
        if last:
            events.append(run.done_mark())
            self._leave(run)
        run.exchange.write(events, last=last)

    def _write_whole(self, run: ScriptedRun) -> None:
        if run.fault is not None and run.fault.kind == "stall":
            return
        self._leave(run)
        if run.fault is None:
            run.exchange.answer_json(run.whole())
        else:
            strike_whole(run, run.fault)
