"""The engine kind of models behind OpenAI-compatible servers."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from shell_router.app.model_files import ModelFiles
from shell_router.app.pairs import SGLANG_BATCH_SIZE
from shell_router.app.wings import Progress, StartedEngine
from shell_router.config import Config
from shell_router.config.models import FromEnvironment, TlsClient, read_secret
from shell_router.core.marks import REASONING_PARSERS, ReasoningMarks
from shell_router.engines.address import PairLimits, ServerAddress
from shell_router.engines.fleet import HEALTH_LIMIT_S
from shell_router.engines.native_body import NativeRules
from shell_router.engines.openai import OpenAIEngine, OpenAIFleet
from shell_router.engines.openai_wire import ChatForm
from shell_router.engines.server_client import Transport
from shell_router.errors import EngineError, require
from shell_router.files.types import SECRET, Count, Seconds, Switch, Url
from shell_router.http.client import HttpClient
from shell_router.http.tasks import TaskOwner
from shell_router.routing.failures import BreakerSettings, RetrySettings

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAISection:
    """A server that has OpenAI's chat completions: vLLM, Ollama, llama.cpp, a provider."""

    url: Annotated[Url, "Base URL of its API, as `http://127.0.0.1:11434/v1`."]
    model: Annotated[str | None, "The model's name there; by default its name here."] = None
    key: Annotated[
        str | FromEnvironment | None, "Key that is sent as a bearer: `{env: NAME}`.", SECRET
    ] = field(default=None, repr=False)
    headers: Annotated[
        Mapping[str, str], "Further headers; secrets as `${NAME}`, from the environment.", SECRET
    ] = field(default_factory=dict, repr=False)
    body: Annotated[
        Mapping[str, Any], "Further fields of every body, as `reasoning_effort: low`."
    ] = field(default_factory=dict)
    tls: Annotated[TlsClient | None, "Certificates, for an https:// URL."] = None
    limit_field: Annotated[
        Literal["max_tokens", "max_completion_tokens"], "The field of an output's limit."
    ] = "max_tokens"
    logprobs: Annotated[
        Switch,
        "Whether it gives log-probabilities, which confidence and most early exits need.",
    ] = False
    max_running: Annotated[
        Count | None, "Requests of this router at a time; by default `scheduling.queue`'s."
    ] = None
    silence_s: Annotated[
        Seconds | None, "Longest silence while it answers; by default `limits.engine_stall_s`."
    ] = None

    def __post_init__(self) -> None:
        require(
            not any(mark in self.url for mark in "?#"),
            "the URL has a query or a fragment, which is never sent",
            "Leave it out.",
        )


class OpenAIServers:
    """The kind; see `EngineKind`. A server that does not answer keeps no other model waiting."""

    settings: ClassVar[type] = OpenAISection

    @asynccontextmanager
    async def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AsyncIterator[Mapping[str, StartedEngine]]:
        """See `EngineKind`."""
        async with AsyncExitStack() as stack:
            engines: dict[str, StartedEngine] = {}
            fleets: dict[str, OpenAIFleet] = {}
            for alias, model_files in files.items():
                engine, section = _connect(alias, model_files, config)
                size = section.max_running or SGLANG_BATCH_SIZE
                name = "OpenAI-compatible server"
                engines[alias] = StartedEngine(
                    engine, name, size, engine.fleet, relay=engine, takes_messages=True
                )
                fleets[alias] = engine.fleet
                stack.push_async_callback(_close, engine.fleet.transport)
            checks = [_check(alias, fleet, on_progress) for alias, fleet in fleets.items()]
            await asyncio.gather(*checks)
            yield engines


def _connect(alias: str, files: ModelFiles, config: Config) -> tuple[OpenAIEngine, OpenAISection]:
    """Make the client of a model's server; it sends nothing yet. Raises ConfigError."""
    section: OpenAISection = config.models[alias].engine["openai"]
    where = f"models.{alias}.openai"
    key = read_secret(section.key, f"{where}.key", os.environ)
    for name, value in {**section.headers, "Authorization": key or ""}.items():
        require(
            _HEADER.fullmatch(name) is not None and not _CONTROL.search(value),
            f"{where}: the header {name!r} has characters that no header may have.",
            "Write its name in letters, digits and '-', and its value in one line.",
        )
    headers = section.headers
    limits = config.limits
    silence_s = section.silence_s or limits.engine_stall_s
    transport = Transport(
        HttpClient(
            connect_s=PairLimits().connect_s,
            tls=section.tls.context(f"{where}.tls") if section.tls else None,
        ),
        TaskOwner(),
        PairLimits(stall_s=silence_s),
        BreakerSettings(failures=limits.breaker_failures, open_s=limits.breaker_open_s),
        time.monotonic,
        key=key,
        headers={"User-Agent": "shell-router", **headers},
    )
    scheduling = config.scheduling
    if section.max_running is not None:
        queue = replace(scheduling.queue, max_running=section.max_running)
        scheduling = replace(scheduling, queue=queue)
    fleet = OpenAIFleet(transport, scheduling, [*filter(None, (key, *headers.values()))])
    fleet.use(ServerAddress(section.url))
    form = ChatForm(
        section.model or alias,
        files.context_length,
        section.limit_field,
        section.logprobs,
        section.body,
        REASONING_PARSERS.get(config.models[alias].reasoning_parser or "", ReasoningMarks()),
    )
    rules = NativeRules(fields=frozenset(limits.native_fields))
    engine = OpenAIEngine(
        fleet,
        form,
        silence_s=silence_s,
        rules=rules,
        retries=RetrySettings(attempts=limits.engine_attempts),
    )
    return engine, section


async def _check(alias: str, fleet: OpenAIFleet, on_progress: Progress) -> None:
    """Ask the server whether it is there, once."""
    try:
        async with asyncio.timeout(HEALTH_LIMIT_S):
            await fleet.ready()
    except (EngineError, TimeoutError) as error:
        why = str(error) or "it does not answer"
        on_progress(f"model {alias} is not ready, and requests fail until it is: {why}")
    else:
        on_progress(f"model {alias} is ready")


async def _close(transport: Transport) -> None:
    await transport.tasks.aclose(transport.limits.abort_s)
    await transport.http.aclose(transport.limits.abort_s)
