"""The engine kind of pairs and undivided servers: SGLang's, or others with its wire format."""

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import orjson
from yarl import URL

from shell_router.app.model_files import ModelFiles
from shell_router.app.wings import Progress, StartedEngine
from shell_router.config import Config, ModelSettings, PairSettings
from shell_router.config.models import ServerSettings, read_secret
from shell_router.core.engine import Tokenizer
from shell_router.engines.address import PairAddress, PairLimits, ServerAddress
from shell_router.engines.native_body import ANY_MODEL, NativeRules
from shell_router.engines.pair_fleet import PairFleet
from shell_router.engines.sglang import AdaptedModel, SglangPair
from shell_router.errors import EngineError, EngineStalled, require
from shell_router.files.read import read_sent
from shell_router.routing.failures import BreakerSettings, RetrySettings

log = logging.getLogger(__name__)

Address = PairAddress | ServerAddress
RETRY_S = 0.5
SAMPLE = "The 12 quick foxes: größer, 東京, 🦊!\n"
"""A text that tokenizers of different families split differently."""
SGLANG_BATCH_SIZE = 32
"""Sequences that an SGLang engine is assumed to decode at once if `auto.max_batch` is not set."""


class SglangPairs:
    """The engine kind of models that name `pairs` or `servers`, which are running already.

    With `may_lack` the router serves after the start limit if at least one model has engines, and
    waits for the engines of the others in the background.
    """

    settings: ClassVar[type] = PairSettings

    def __init__(self, *, may_lack: bool = False) -> None:
        self._may_lack = may_lack

    @asynccontextmanager
    async def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AsyncIterator[Mapping[str, StartedEngine]]:
        """See `EngineKind`."""
        addresses = {alias: [*map(address_of, config.models[alias].sglang)] for alias in files}
        async with run_pairs(
            addresses, files, config, on_progress, may_lack=self._may_lack
        ) as pools:
            engines = {}
            for alias, pool in pools.items():
                name = await _name(pool.fleet)
                engines[alias] = build_engine(pool, name, SGLANG_BATCH_SIZE, config.models[alias])
            yield engines


def build_engine(
    pool: SglangPair,
    name: str,
    batch_size: int,
    model: ModelSettings,
    restarts: Callable[[], Mapping[str, int]] = dict,
) -> StartedEngine:
    """Return a model's servers as a started engine; see its attributes."""
    adapted = {adapter: AdaptedModel(pool, adapter) for adapter in pool.adapters}
    return StartedEngine(
        pool,
        name,
        batch_size,
        pool.fleet,
        relay=pool,
        call_parser=pool,
        adapters={adapter: (engine, engine) for adapter, engine in adapted.items()},
        read_address=partial(_read_address, model, pool.fleet),
        restarts=restarts,
    )


def _read_address(model: ModelSettings, fleet: PairFleet, fields: Mapping[str, Any]) -> Address:
    """Read a pair or a server that is added. Raises InvalidField or ConfigError."""
    name = "pair"
    kind: type[PairSettings | ServerSettings] = PairSettings
    if fleet.undivided:
        name = "server"
        kind = ServerSettings
    sent = read_sent(kind, fields, name)
    require(
        sent.launch is None,
        f"{name}.launch works only in files.",
        "Start its engines, and leave launch out.",
    )
    address = address_of(sent)
    settings = tuple(_settings_of(at) for at in (*fleet.addresses, address))
    changes: dict[str, Any] = {f"{name}s": settings}
    replace(model, **changes)  # its constructor checks all together
    return address


def _settings_of(address: Address) -> PairSettings | ServerSettings:
    if isinstance(address, ServerAddress):
        return ServerSettings(address.url)
    return PairSettings(
        address.prefill_url, address.decode_url, address.bootstrap_port, address.bootstrap_host
    )


def address_of(at: PairSettings | ServerSettings) -> Address:
    """Return the address; a pair's bootstrap host is the prefill server's by default."""
    if isinstance(at, ServerSettings):
        return ServerAddress(at.server)
    host = at.bootstrap_host or URL(at.prefill).host or ""
    return PairAddress(at.prefill, at.decode, host, at.bootstrap_port)


async def _name(fleet: PairFleet) -> str:
    """Name the servers by the version that they report; a plain version is SGLang's."""
    try:
        version = await fleet.version()
    except EngineError as error:
        log.warning("an engine does not report its version: %s", error)
        return "engine of unknown kind"
    return {"scripted": "scripted engine", "embedded": "embedded pair"}.get(
        version, f"SGLang {version}"
    )


@asynccontextmanager
async def run_pairs(
    addresses: Mapping[str, Sequence[Address]],
    files: Mapping[str, ModelFiles],
    config: Config,
    on_progress: Progress,
    *,
    may_lack: bool = False,
    client: type[SglangPair] = SglangPair,
) -> AsyncIterator[Mapping[str, SglangPair]]:
    """Yield the pairs of each model once all of them serve. Raises EngineError.

    With `may_lack` it also yields them when the limit is over and the pairs of one model serve.
    Then it waits for the others in the background.
    """
    async with AsyncExitStack() as stack:
        fields = frozenset(config.limits.native_fields)
        pools = dict[str, SglangPair]()
        for alias, pairs in addresses.items():
            rules = NativeRules(files[alias].vocabulary, files[alias].context_length, fields)
            pools[alias] = connect_pairs(alias, pairs, config, rules, client)
            stack.push_async_callback(pools[alias].aclose)
        await stack.enter_async_context(
            _probe_servers(
                pools, files, config.limits.engine_start_s, on_progress, may_lack=may_lack
            )
        )
        for pool in pools.values():
            await stack.enter_async_context(pool.fleet.follow())
        yield pools


async def _check_tokenizers(alias: str, fleet: PairFleet, tokenizer: Tokenizer) -> None:
    """Warn of servers that tokenize otherwise than the model's folder. Only SGLang's can say."""
    body = orjson.dumps({"prompt": SAMPLE, "add_special_tokens": False})
    for server in fleet.servers:
        with suppress(EngineError, ValueError, KeyError, TypeError):
            answer = await server.post("tokenize", body, limit_s=server.limits.connect_s)
            if orjson.loads(answer)["tokens"] != tokenizer.encode(SAMPLE):
                log.warning(
                    "the %s tokenizes otherwise than the folder of model %s, so its answers are "
                    "wrong; correct the URLs or the path",
                    server,
                    alias,
                )


def connect_pairs(
    alias: str,
    addresses: Sequence[Address],
    config: Config,
    rules: NativeRules = ANY_MODEL,
    client: type[SglangPair] = SglangPair,
) -> SglangPair:
    """Make the client of a model's servers, which the caller closes; it sends nothing yet.

    Raises:
        ConfigError: A secret or a certificate is missing.
    """
    limits = config.limits
    model = config.models[alias]
    # routers with one order would all choose the same of equal engines
    addresses = random.sample(addresses, len(addresses))
    key = f"models.{alias}.engine_key"
    return client(
        *addresses,
        limits=PairLimits(stall_s=limits.engine_stall_s, answer_s=limits.request_timeout_s),
        retries=RetrySettings(attempts=limits.engine_attempts),
        breaker=BreakerSettings(failures=limits.breaker_failures, open_s=limits.breaker_open_s),
        rules=rules,
        isolates=limits.isolate_tenants,
        scheduling=config.scheduling,
        adapters=tuple(model.adapters),
        folder=model.path,
        key=read_secret(model.engine_key, key, os.environ),
        tls=model.engine_tls.context(f"models.{alias}.engine_tls") if model.engine_tls else None,
    )


@asynccontextmanager
async def _probe_servers(
    pools: Mapping[str, SglangPair],
    files: Mapping[str, ModelFiles],
    limit_s: float,
    on_progress: Progress,
    *,
    may_lack: bool,
) -> AsyncIterator[None]:
    """Enter when every server is healthy and probed; see `run_pairs`."""
    late = asyncio.Event()
    reasons: dict[str, str] = {}
    probes = {
        alias: asyncio.create_task(
            _probe(alias, pool.fleet, files[alias].tokenizer, on_progress, late, reasons)
        )
        for alias, pool in pools.items()
    }
    try:
        ended, waiting = await asyncio.wait(
            probes.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for probe in ended:
            probe.result()
        missing = [alias for alias, probe in probes.items() if probe in waiting]
        if missing and not (may_lack and ended):
            why = "; ".join(reasons.get(alias, "no answer") for alias in missing)
            raise EngineStalled(
                f"The engines of {', '.join(missing)} were not ready within {limit_s:g} s: {why}.",
                remedy="Look at their logs, or raise limits.engine_start_s.",
            )
        for alias in missing:
            log.error(
                "model %s is missing: its engines were not ready within %g s; still waiting",
                alias,
                limit_s,
            )
        late.set()
        yield
    finally:
        for probe in probes.values():
            probe.cancel()
        await asyncio.gather(*probes.values(), return_exceptions=True)


async def _probe(
    alias: str,
    fleet: PairFleet,
    tokenizer: Tokenizer,
    on_progress: Progress,
    late: asyncio.Event,
    reasons: dict[str, str],
) -> None:
    """Wait for the servers, which may still be loading, and probe them.

    The caller limits the wait. `reasons` gets the cause of it. Once `late` is set, a failed probe
    is repeated, not raised.
    """
    healthy = False
    while True:
        try:
            await fleet.ready()
            healthy = True
            ways = await fleet.probe()
            break
        except EngineError as error:
            if healthy and not late.is_set():
                raise
            notes = getattr(error, "__notes__", ())  # they name the server's URL
            reason = "; ".join(notes) or str(error)
            if reasons.get(alias) != reason:
                on_progress(f"model {alias}: waiting for its engines ({reason})")
            reasons[alias] = reason
            await asyncio.sleep(RETRY_S)
    if fleet.transport.folder.name:  # else the model, and its tokenizer, change
        await _check_tokenizers(alias, fleet, tokenizer)
    how = " and ".join(sorted(set(ways))) or "what its load finds"
    on_progress(f"model {alias} is ready; prefill-only by {how}")
    if "pair" in ways:
        log.warning(
            "model %s: no prefill-only request warms the cache; one-token requests take its place",
            alias,
        )
