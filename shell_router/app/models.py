"""The running models of a deployment, each with its tokenizer and the engines that serve it."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from yarl import URL

from shell_router.app.model_files import ModelFiles, read_files
from shell_router.app.wings import EngineKind, Progress, StartedEngine, engine_kind, kind_of
from shell_router.config import Config, ModelSettings, PairSettings
from shell_router.config.models import adapted_name, secret
from shell_router.core.engine import ServedModel
from shell_router.core.marks import CALL_MARKS, REASONING_PARSERS
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.native_body import ANY_MODEL, NativeRules
from shell_router.engines.server_client import ServerClient
from shell_router.engines.sglang import AdaptedModel, SglangPair
from shell_router.errors import EngineError, EngineStalled, require
from shell_router.files.read import read_sent
from shell_router.routing.dispatcher import TrackedEngine
from shell_router.routing.failures import BreakerSettings, RetrySettings

log = logging.getLogger(__name__)

RETRY_S = 0.5
SGLANG_BATCH_SIZE = 32
"""Sequences that an SGLang engine is taken to decode together where `auto.max_batch` says nothing.
"""


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A model as requests see it, and the engine that serves it. Token ids are below
    `vocabulary`."""

    served: ServedModel
    engine: StartedEngine
    vocabulary: int

    @property
    def pool(self) -> SglangPair | None:
        """Its prefill and decode servers, where pairs serve it."""
        if isinstance(self.engine.engine, SglangPair):
            return self.engine.engine
        return None


def engine_kinds(
    config: Config, kinds: Mapping[str, EngineKind] | None = None
) -> Mapping[str, EngineKind]:
    """Return the kinds that the models need, those of `kinds` first. Raises ConfigError."""
    return {name: (kinds or {}).get(name) or engine_kind(name) for name in _aliases_by_kind(config)}


def _aliases_by_kind(config: Config) -> Mapping[str, list[str]]:
    by_kind: dict[str, list[str]] = {}
    for alias, model in config.models.items():
        name = "swapping" if alias in config.swapped else kind_of(model)
        by_kind.setdefault(name, []).append(alias)
    return by_kind


@asynccontextmanager
async def running_models(
    config: Config, on_progress: Progress, kinds: Mapping[str, EngineKind] | None = None
) -> AsyncIterator[Mapping[str, RunningModel]]:
    """Every model by its alias; `on_progress` gets a line per step. `kinds` take precedence over
    the wing table's.

    Raises ConfigError and EngineError.
    """
    by_kind = _aliases_by_kind(config)
    used = engine_kinds(config, kinds)
    async with AsyncExitStack() as stack:
        files = await asyncio.to_thread(read_files, config.models)
        engines: dict[str, StartedEngine] = {}
        for name, kind in used.items():
            its_files = {alias: files[alias] for alias in by_kind[name]}
            engines |= await stack.enter_async_context(kind.running(its_files, config, on_progress))
        yield {
            alias: RunningModel(
                _served(alias, model, engines[alias], files[alias]),
                engines[alias],
                files[alias].vocabulary,
            )
            for alias, model in config.models.items()
        }


def _served(
    alias: str, settings: ModelSettings, engine: StartedEngine, files: ModelFiles
) -> ServedModel:
    model = ServedModel(
        alias,
        engine.engine,
        files.tokenizer,
        files.context_length,
        vocabulary=files.vocabulary,
        drafts=settings.drafts,
        reasoning=REASONING_PARSERS.get(settings.reasoning_parser or ""),
        call_mark=CALL_MARKS.get(settings.tool_call_parser or ""),
    )
    pool = engine.engine
    if isinstance(pool, SglangPair):
        return with_servers(replace(model, call_parser=pool), pool)
    return model


def adapted_models(
    base: ServedModel, pool: SglangPair
) -> Mapping[str, tuple[ServedModel, AdaptedModel]]:
    """Return the adapters of a running model as models by their names, each with its engine."""
    adapted = {}
    for adapter in pool.adapters:
        name = adapted_name(base.alias, adapter)
        engine = AdaptedModel(pool, adapter)
        adapted[name] = replace(base, alias=name, engine=engine, base=base.alias), engine
    return adapted


class Fleet:
    """The pairs of models, added and drained while requests run. `served` follows them. See
    `api.services.Fleet`.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSettings],
        pools: Mapping[str, SglangPair],
        served: dict[str, ServedModel],
    ) -> None:
        self._models = models
        self._pools = pools
        self._served = served
        self._change = asyncio.Lock()
        self._drained: dict[tuple[str, str, str], list[TrackedEngine[ServerClient]]] = {}

    def listed(self) -> list[dict[str, Any]]:
        """Every pair."""
        pairs = ((alias, at) for alias, pool in self._pools.items() for at in pool.addresses)
        return [
            {"model": alias, "prefill": at.prefill_url, "decode": at.decode_url}
            for alias, at in pairs
        ]

    async def add(self, alias: str, given: Mapping[str, Any]) -> None:
        """Serve the model by this pair, too, once it is found good. Raises InvalidField,
        ConfigError, EngineError.
        """
        pool = self._pool(alias)
        pair = read_sent(PairSettings, given, "pair")
        require(
            pair.launch is None,
            "pair.launch is for files.",
            "Start its engines, and leave launch out.",
        )
        address = address_of(pair)
        model = self._models[alias]
        async with self._change:
            require(
                address not in pool.addresses,
                f"Model {alias!r} has this pair already.",
                "GET /v1/engines lists all.",
            )
            found = (*pool.addresses, address)
            pairs = (
                PairSettings(at.prefill_url, at.decode_url, at.bootstrap_port, at.bootstrap_host)
                for at in found
            )
            replace(model, pairs=tuple(pairs))  # checks them together
            await pool.add(address)
            self._served[alias] = with_servers(self._served[alias], pool)

    async def drain(self, alias: str, prefill: str, decode: str, limit_s: float) -> int:
        """Serve the model without this pair; gives how many requests still run there after
        `limit_s`. They go on.

        For one that is drained already it waits again.
        """
        pool = self._pool(alias)
        pair = (alias, prefill, decode)
        async with self._change:
            found = [
                one
                for one in pool.addresses
                if (one.prefill_url, one.decode_url) == (prefill, decode)
            ]
            is_known = bool(found) or pair in self._drained
            require(is_known, f"Model {alias!r} has no such pair.", "GET /v1/engines lists all.")
            if found:
                require(
                    len(pool.addresses) > 1,
                    f"It is the last pair of model {alias!r}.",
                    "First add another.",
                )
                self._drained[pair] = pool.drain(found[0])
                self._served[alias] = with_servers(self._served[alias], pool)
        drained = self._drained[pair]
        running = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while running := max((at.load.running for at in drained), default=0):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                pool.forget(at.engine for at in drained)
                drained.clear()
        return running

    def _pool(self, alias: str) -> SglangPair:
        require(
            alias in self._pools,
            f"No model {alias!r} is served by pairs.",
            "GET /v1/engines lists all.",
        )
        return self._pools[alias]


def with_servers(model: ServedModel, pool: SglangPair) -> ServedModel:
    """The model with what its prefill servers cost now."""
    prefills, _ = pool.dispatchers
    return replace(model, prefill_cost=pool.prefill_cost, prefill_servers=len(prefills.engines))


class SglangPairs:
    """The engine kind of models that name `pairs`, which run already.

    With `may_lack` some models may have no engines yet, while others do: theirs are waited for in
    the background.
    """

    settings: ClassVar[type] = PairSettings

    def __init__(self, *, may_lack: bool = False) -> None:
        self._may_lack = may_lack

    @asynccontextmanager
    async def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AsyncIterator[Mapping[str, StartedEngine]]:
        """See `EngineKind`."""
        addresses = {alias: [*map(address_of, config.models[alias].pairs)] for alias in files}
        async with running_pairs(
            addresses, files, config, on_progress, may_lack=self._may_lack
        ) as pools:
            yield {
                alias: StartedEngine(pool, await _name(pool), SGLANG_BATCH_SIZE)
                for alias, pool in pools.items()
            }


def address_of(pair: PairSettings) -> PairAddress:
    """The pair as its client wants it. By default the bootstrap server is on the prefill server's
    host.
    """
    host = pair.bootstrap_host or URL(pair.prefill).host or ""
    return PairAddress(pair.prefill, pair.decode, host, pair.bootstrap_port)


async def _name(pool: SglangPair) -> str:
    """What its servers are by the version that they give; one that has a number is SGLang."""
    try:
        version = await pool.version()
    except EngineError as error:
        log.warning("an engine does not say what it is: %s", error)
        return "engine of unknown kind"
    return {"scripted": "scripted engine", "embedded": "embedded pair"}.get(
        version, f"SGLang {version}"
    )


@asynccontextmanager
async def running_pairs(
    addresses: Mapping[str, Sequence[PairAddress]],
    files: Mapping[str, ModelFiles],
    config: Config,
    on_progress: Progress,
    *,
    may_lack: bool = False,
    client: Callable[..., SglangPair] = SglangPair,
) -> AsyncIterator[Mapping[str, SglangPair]]:
    """Per alias the `client` of its prefill and decode servers, once all of them serve. Raises
    EngineError.

    With `may_lack`, once those of one model serve and the limit is over; the others are waited for
    meanwhile.
    """
    async with AsyncExitStack() as stack:
        fields = frozenset(config.limits.native_fields)
        pools = dict[str, SglangPair]()
        for alias, found in addresses.items():
            rules = NativeRules(files[alias].vocabulary, files[alias].context_length, fields)
            pools[alias] = await pool_of(alias, found, config, rules, client)
        for pool in pools.values():
            stack.push_async_callback(pool.aclose)
        await stack.enter_async_context(
            _probed(pools, config.limits.engine_start_s, on_progress, may_lack=may_lack)
        )
        for pool in pools.values():
            await stack.enter_async_context(pool.followed())
        yield pools


async def pool_of(
    alias: str,
    addresses: Sequence[PairAddress],
    config: Config,
    rules: NativeRules = ANY_MODEL,
    client: Callable[..., SglangPair] = SglangPair,
) -> SglangPair:
    """The client of a model's servers, which is to be closed. Nothing is sent to them yet. Raises
    ConfigError.
    """
    limits = config.limits
    model = config.models[alias]
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
        key=secret(model.engine_key, key, os.environ),
        tls=model.engine_tls.context(f"models.{alias}.engine_tls") if model.engine_tls else None,
    )


@asynccontextmanager
async def _probed(
    pools: Mapping[str, SglangPair], limit_s: float, on_progress: Progress, *, may_lack: bool
) -> AsyncIterator[None]:
    """Enter when every server is healthy and its way of prefill-only is known; see
    `running_pairs`."""
    late = asyncio.Event()
    probes = {
        alias: asyncio.create_task(_probe(alias, pool, on_progress, late))
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
            raise EngineStalled(
                f"The engines of {', '.join(missing)} were not ready within {limit_s:g} s.",
                remedy="Look at their logs, or raise limits.engine_start_s.",
            )
        for alias in missing:
            log.error(
                "model %s is missing: its engines were not ready within %g s; they are waited for",
                alias,
                limit_s,
            )
        late.set()
        yield
    finally:
        for probe in probes.values():
            probe.cancel()
        await asyncio.gather(*probes.values(), return_exceptions=True)


async def _probe(alias: str, pool: SglangPair, on_progress: Progress, late: asyncio.Event) -> None:
    """Wait for the servers, which may still be loading; the caller sets the limit, or says that it
    is `late`.

    Then nothing is raised: what cannot be probed is probed again.
    """
    said = ""
    healthy = False
    while True:
        try:
            await pool.ready()
            healthy = True
            ways = await pool.probe()
            break
        except EngineError as error:
            if healthy and not late.is_set():
                raise
            reason = "; ".join(getattr(error, "__notes__", ())) or str(
                error
            )  # with the server's URL
            if said != reason:
                on_progress(f"model {alias}: waiting for its engines ({reason})")
            said = reason
            await asyncio.sleep(RETRY_S)
    on_progress(
        f"model {alias} is ready; prefill-only by "
        f"{' and '.join(sorted(set(ways))) or 'what its load finds'}"
    )
    if "pair" in ways:
        log.warning(
            "model %s: no prefill-only request warms the cache; one-token requests take its place",
            alias,
        )
