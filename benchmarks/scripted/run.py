"""A scripted server's settings and faults, and one request on it."""

import asyncio
import time
import zlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import orjson

from benchmarks.scripted.http import Exchange

FaultKind = Literal["refuse", "status", "close", "stall", "garbage", "error_event", "abort"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with a request.

    `refuse` breaks the connection at once and `status` answers `status`; the others strike after
    `after_tokens` tokens of a stream, or instead of an answer that is not streamed. It strikes
    `times` requests, or all when None.
    """

    kind: FaultKind
    after_tokens: int = 0
    status: int = 500
    message: str = "scripted fault"
    times: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(
                f"fault kind must be one of {', '.join(get_args(FaultKind))}, not {self.kind!r}"
            )


@dataclass(frozen=True, slots=True)
class ScriptedSettings:
    """How a scripted server behaves.

    Delays are seconds: `prefill_s` plus `prefill_token_s` for each token not cached, then `token_s`
    for each token; with `token_s` 0 a whole answer is written at once. A server of the role `null`,
    SGLang's word for it, prefills and decodes. `warms` names the
    prefill-only requests that fill the prefix cache, which holds `cache_tokens`; without `route`
    there is no such route. `cut_bytes` above 0 writes in pieces of that size, `crlf` ends lines as
    some proxies do. `log_bodies` keeps the bodies of that many last requests. With `stamped` every
    output says in `meta_info.sent_s` when it was written, in seconds of the machine's monotonic
    clock. `adapters` names the LoRA adapters that it was started with. With `memory_saver` it gives
    its memory back and takes it again; with `cpu_backup` its weights are kept meanwhile.
    `server_info` is what it reports besides of its settings.
    """

    role: Literal["prefill", "decode", "null"] = "decode"
    incremental: bool = True
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    token_s: float = 0.0
    vocabulary: int = 1000
    context_length: int = 32768
    cache_tokens: int = 1_000_000
    warms: tuple[Literal["route"], ...] = ("route",)
    cut_bytes: int = 0
    crlf: bool = False
    log_bodies: int = 0
    stamped: bool = False
    adapters: tuple[str, ...] = ()
    device: Literal["cuda", "cpu"] = "cuda"
    memory_saver: bool = False
    cpu_backup: bool = False
    server_info: Mapping[str, Any] = field(default_factory=dict)
    fault: Fault | None = None

    def __post_init__(self) -> None:
        least = {"vocabulary": 1, "context_length": 1}
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and value < least.get(name, 0):
                raise ValueError(f"{name} must be at least {least.get(name, 0)}, not {value}")


DEFAULT_SETTINGS = ScriptedSettings()


def read_script(found: dict[str, Any]) -> dict[str, Any]:
    """The settings to change, from the body of `POST /script`; raises TypeError or ValueError."""
    changes = dict(found)
    if changes.get("fault") is not None:
        changes["fault"] = Fault(**changes["fault"])
    if "warms" in changes:
        changes["warms"] = tuple(changes["warms"])
    return changes


ID_BYTES = 8


class BadRequest(Exception):
    """What the server answers with 400 and this message."""


def scripted_id(seed: int, position: int, vocabulary: int) -> int:
    """The id at an output position: arithmetic modulo the vocabulary, so that every prompt has its
    own output.
    """
    return (seed + (position + 1) * 7919) % vocabulary


class ScriptedRun:
    """One request that has been accepted. Its output is a function of its prompt, its sampling
    parameters, its adapter.

    `scored_from` is the first prompt token whose log probability is asked for, or the prompt's
    length for none.
    """

    def __init__(
        self, exchange: Exchange, body: dict[str, Any], settings: ScriptedSettings
    ) -> None:
        self.exchange = exchange
        self.settings = settings
        self.rid = str(body.get("rid") or id(self))
        self.room: int | None = body.get("bootstrap_room")
        self.prompt = _packed_prompt(body)
        self.adapter: str | None = body.get("lora_path")
        self.prompt_tokens = len(self.prompt) // ID_BYTES
        self.cached_tokens = 0
        self.stream = body.get("stream") is True
        self.fault: Fault | None = None
        self.sent = 0
        self.ended = False
        self._logprobs = body.get("return_logprob") is True
        self._logprob_text = body.get("return_text_in_logprobs") is True
        self.scored_from = self._read_start(body.get("logprob_start_len"))
        self._plan(body.get("sampling_params") or {})

    def _plan(self, sampling: dict[str, Any]) -> None:
        self._interval = max(1, int(sampling.get("stream_interval") or 1))
        wanted = sampling.get("max_new_tokens", 128)
        if not isinstance(wanted, int) or wanted < 0:
            raise BadRequest(f"max_new_tokens must be at least 0, got {wanted}.")
        limit = self.settings.context_length
        if self.prompt_tokens >= limit:
            raise BadRequest(
                f"The input ({self.prompt_tokens} tokens) is longer than the model's context "
                f"length ({limit} tokens)."
            )
        wanted = min(wanted, limit - self.prompt_tokens)
        seed = zlib.crc32((self.adapter or "").encode(), zlib.crc32(self.prompt))
        self.ids = [
            scripted_id(seed, position, self.settings.vocabulary) for position in range(wanted)
        ]
        self._reason: dict[str, Any] = {"type": "length", "length": wanted}
        stops = sampling.get("stop_token_ids") or ()
        first = next((position for position, token in enumerate(self.ids) if token in stops), None)
        if first is not None:
            self._reason = {"type": "stop", "matched": self.ids[first]}
            del self.ids[first + 1 :]

    def _read_start(self, start: object) -> int:
        if not self._logprobs or start in (None, -1):
            return self.prompt_tokens
        if not isinstance(start, int) or not 0 <= start <= self.prompt_tokens:
            raise BadRequest(
                f"logprob_start_len must be -1 or at most {self.prompt_tokens}, got {start}."
            )
        return start

    def output(self, start: int, end: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        """Output tokens `start` to `end` as SGLang writes them."""
        ids = self.ids[start:end]
        shown = ids[:-1] if reason is not None and reason["type"] == "stop" else ids
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": end,
            "cached_tokens": self.cached_tokens,
        }
        if self._logprobs:
            meta["input_token_logprobs"] = (
                self._input_logprobs() if self.settings.role != "decode" else []
            )
            meta["output_token_logprobs"] = [self._scored(token) for token in ids]
        if self.settings.stamped:
            meta["sent_s"] = time.monotonic()
        return {"text": "".join(map(_text, shown)), "output_ids": ids, "meta_info": meta}

    def _input_logprobs(self) -> list[tuple[float | None, int, str | None]]:
        """As SGLang, which has no log probability for the first."""
        scored = [self._scored(token) for token in array("q", self.prompt)[self.scored_from :]]
        return [(None, token, text) for _, token, text in scored[:1]] + scored[1:]

    def _scored(self, token: int) -> tuple[float | None, int, str | None]:
        return -(token % 97 + 1) / 100, token, _text(token) if self._logprob_text else None

    def events(self, until: int) -> list[bytes]:
        """The stream's events for the tokens not yet sent before `until`, the finish with the
        last."""
        events: list[bytes] = []
        while not events or self.sent < until:
            end = min(until, self.due)
            reason = self._reason if end >= len(self.ids) else None
            events.append(
                self.framed(self.output(self.sent if self.settings.incremental else 0, end, reason))
            )
            self.sent = end
        return events

    @property
    def due(self) -> int:
        """Where the next event ends: the first holds one token, each later one `stream_interval` of
        them.
        """
        return min(self.sent + self._interval if self.sent else 1, len(self.ids))

    def framed(self, found: dict[str, Any]) -> bytes:
        """An event as it goes over the wire."""
        return b"data: " + orjson.dumps(found) + (b"\r\n\r\n" if self.settings.crlf else b"\n\n")

    def done_mark(self) -> bytes:
        """The stream's last line."""
        return b"data: [DONE]" + (b"\r\n\r\n" if self.settings.crlf else b"\n\n")

    def aborted(self, message: str = "Aborted", status: int | None = None) -> dict[str, Any]:
        """The last output of a request that was aborted after `sent` tokens."""
        reason = {"type": "abort", "message": message, "status_code": status, "err_type": None}
        start = self.sent if self.settings.incremental and self.stream else 0
        return self.output(start, self.sent, reason)

    def first_token_only(self) -> None:
        """A prefill server answers with the first token."""
        del self.ids[1:]
        self._reason = {"type": "length", "length": len(self.ids)}

    def strike(self, fault: Fault) -> bool:
        """Write a stream's tokens before the fault, then let it happen. True when the answer has
        ended with it.
        """
        events = self.events(fault.after_tokens) if self.sent < fault.after_tokens else []
        self.ended = True
        last = fault.kind in ("garbage", "error_event", "abort")
        if fault.kind == "garbage":
            events.append(b"data: {broken\n\n")
        elif fault.kind == "error_event":
            events.append(self.framed({"error": {"message": fault.message, "code": fault.status}}))
        elif fault.kind == "abort":
            events.append(self.framed(self.aborted(fault.message, fault.status)))
        if events:
            self.exchange.write(events, last=last)
        if fault.kind == "close":
            self.exchange.drop()
        return last

    def answer_whole(self) -> None:
        """The answer that is not streamed, or the fault in its place."""
        fault = self.fault
        if fault is None:
            self.exchange.answer_json(self.output(0, len(self.ids), self._reason))
        elif fault.kind == "close":
            self.exchange.drop()
        elif fault.kind == "garbage":
            self.exchange.answer(200, b"{broken")
        else:
            self.exchange.answer_json({"error": {"message": fault.message}}, fault.status)


def _text(token: int) -> str:
    return f" ω{token}"


def _packed_prompt(body: dict[str, Any]) -> bytes:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("Either text or input_ids must be provided, and not both.")
    if ids is not None and not isinstance(ids, list):
        raise BadRequest("input_ids must be a list of integers.")
    try:
        prompt = array("q", list(str(text).encode()) if ids is None else ids).tobytes()
    except (TypeError, OverflowError) as error:
        raise BadRequest(f"input_ids must be integers: {error}") from error
    if not prompt:
        raise BadRequest("The prompt is empty.")
    return prompt


class ScriptedGpu:
    """Memory for `places` servers that are awake; `taken` by these now, and by `most` at a time."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = self.most = 0

    def take(self) -> bool:
        """False where there is too little."""
        self.taken += 1
        self.most = max(self.most, self.taken)
        return self.taken <= self.places


class ScriptedMemory:
    """A server's memory, given back and taken again as by SGLang 0.5.23, which ends at every
    mistake.

    It ends where it is to sleep while it is busy (an assertion) or asleep (torch_memory_saver), to
    wake while it is awake (a KeyError), and to compute or to read weights while it sleeps. `died`
    says of what it did. It wakes, and reads weights, while `gate` is open. `refuses` has the words
    with which it refuses to `sleep` or `read`; `busy` times it still has something to do. `changes`
    names what it did, `without_weights` counts requests that it computed with none. Until it is
    `warm`, `/health` answers 503, and it has a request of its own to come.
    """

    def __init__(
        self,
        settings: Callable[[], ScriptedSettings],
        busy: Callable[[], bool],
        end: Callable[[], None],
    ) -> None:
        self._settings, self._runs, self._end = settings, busy, end
        self.gpu = ScriptedGpu(10**9)
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuses: dict[str, str] = {}
        self.busy = 0
        self.changes: list[str] = []
        self.without_weights = 0
        self.died = ""
        self.begin()

    def begin(self) -> None:
        """Have what a server has after its start."""
        self._life = object()
        self.version, self.asleep, self.has_weights, self.died = "default", False, True, ""
        self.warm, self.model_path = True, ""  # it stands for any model

    def die(self, why: str) -> None:
        """End the server: its memory is free."""
        if not self.died:
            self.died = why
            self.gpu.taken -= not self.asleep
            self._end()

    def _busy(self) -> bool:
        self.busy, busy = max(0, self.busy - 1), self.busy > 0
        return busy or self._runs()

    def computes(self) -> bool:
        """False where a request ends the server."""
        if self.asleep:
            self.die("CUDA error: an illegal memory access was encountered")
        self.without_weights += not self.has_weights
        return not self.died

    def warm_up(self) -> None:
        """Compute the request that SGLang sends itself a second after it answers."""
        self.warm = self.computes()

    def release(self, exchange: Exchange) -> None:
        """`POST /release_memory_occupation`."""
        if "sleep" in self.refuses:
            exchange.answer_json({"error": {"message": self.refuses["sleep"]}}, 400)
        elif self._busy():
            self.die(
                "AssertionError: release_memory_occupation should be called only when server "
                "is "
                "idle."
            )
        elif self.asleep:
            self.die("Cannot pause allocation that is not active.")
        else:
            self.changes.append("sleep")
            self.gpu.taken -= 1
            self.asleep, self.has_weights = True, self._settings().cpu_backup
            exchange.answer(200, b"null")

    def resume(self, exchange: Exchange) -> None:
        """`POST /resume_memory_occupation`."""
        if not self.asleep:
            self.die("KeyError: 'kv_cache'")
        else:
            self._later(exchange, self._resumed)

    def _resumed(self, exchange: Exchange) -> None:
        self.asleep = False
        self.changes.append("wake")
        if not self.gpu.take():
            self.die("CUDA error: out of memory")
        else:
            exchange.answer(200, b"null")

    def read_weights(self, exchange: Exchange) -> None:
        """`POST /update_weights_from_disk`."""
        if self.asleep:
            self.die("CUDA error: an illegal memory access was encountered")
        elif "read" in self.refuses:
            exchange.answer_json({"success": False, "message": self.refuses["read"]}, 400)
        else:
            self._later(exchange, self._read)

    def _read(self, exchange: Exchange) -> None:
        self.has_weights, self.model_path = True, str(orjson.loads(exchange.body)["model_path"])
        self.changes.append("read")
        exchange.answer_json({"success": True, "message": "Succeeded to update model weights."})

    def _later(self, exchange: Exchange, act: Callable[[Exchange], None]) -> None:
        async def wait(life: object) -> None:
            await self.gate.wait()
            if life is self._life and not self.died:
                act(exchange)

        self._waiting = asyncio.get_running_loop().create_task(wait(self._life))

    def flush(self, exchange: Exchange) -> None:
        """`POST /flush_cache`."""
        busy = self._busy()
        exchange.answer(
            400 if busy else 200, b"Flush cache failed.\n" if busy else b"Cache flushed.\n"
        )

    def set_version(self, exchange: Exchange) -> None:
        """`POST /update_weight_version`."""
        asked = orjson.loads(exchange.body)
        if asked.get("abort_all_requests", True):
            raise BadRequest("This would abort all requests.")
        self.version = str(asked["new_version"])
        exchange.answer_json({"success": True, "new_version": self.version})
