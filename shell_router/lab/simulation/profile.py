"""`shell-router profile`: a deployment's models measured one after the other, and written to a file of profiles."""

import os
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from shell_router.app.launching import launched_engines, plan_launch
from shell_router.app.models import running_models
from shell_router.app.wings import load_config
from shell_router.config import Config, ModelSettings
from shell_router.core.engine import ServedModel
from shell_router.errors import ConfigError
from shell_router.lab.simulation.profiling import Amount, ProfiledCosts, profiled
from shell_router.lab.simulation.settings import load_profiles
from shell_router.lab.simulation.yaml_entries import entry_text, rounded, with_entries, write_entries
from shell_router.standins.embedded.settings import EmbeddedSection, EmbeddedSettings
from shell_router.standins.simulated import DecodeCosts, PairCosts, PrefillCosts


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A model on one pair, what serves it in words, and the pair's limits as costs that take no time."""

    served: ServedModel
    engine: str
    vocabulary: int
    limits: PairCosts


@asynccontextmanager
async def profiled_models(
    config: Config, aliases: Collection[str], name: str, machine: str | None, on_progress: Callable[[str], None]
) -> AsyncIterator[Mapping[str, ProfiledModel]]:
    """The models `aliases`, or all where it is empty, each on its first pair; `on_progress` gets a line per step.

    Embedded pairs are started, and pairs with `launch`, on `machine`, as `shell-router launch` does under `name`;
    others are expected to run. Raises ConfigError and EngineError.
    """
    wanted = with_one_pair_each(config, aliases)
    async with AsyncExitStack() as stack:
        if any(pair.launch for model in wanted.models.values() for pair in model.pairs):
            planned = plan_launch(wanted, name, machine, os.environ)
            on_progress(f"starting {len(planned.engines)} engines; their logs are in {planned.folder}")
            await stack.enter_async_context(launched_engines(planned))
            wanted = planned.config
        running = await stack.enter_async_context(running_models(wanted, on_progress))
        yield {
            alias: ProfiledModel(model.served, model.engine.name, model.vocabulary, limits_of(wanted.models[alias]))
            for alias, model in running.items()
        }


def with_one_pair_each(config: Config, aliases: Collection[str]) -> Config:
    """The deployment with these models, or all where `aliases` is empty, none of them on several pairs.

    An engine that ends stays down: what it did not live through was not measured. Raises ConfigError.
    """
    if unknown := sorted(set(aliases) - config.models.keys()):
        raise ConfigError(
            f"The deployment has no model {', '.join(unknown)}.", remedy=f"Choose from: {', '.join(config.models)}."
        )
    models = {
        alias: replace(model, pairs=model.pairs[:1])
        for alias, model in config.models.items()
        if alias in aliases or not aliases
    }
    return replace(config, models=models, launch=replace(config.launch, restart_limit=0))


def limits_of(model: ModelSettings) -> PairCosts:
    """Those of an embedded pair as the deployment sets them; SGLang's defaults for others."""
    if model.pairs:
        return PairCosts(PrefillCosts(0.0, 0.0), DecodeCosts(0.0))
    section = model.engine.get("embedded") or EmbeddedSection()
    chunk_tokens = EmbeddedSettings(model_path="").chunked_prefill_size
    return PairCosts(
        PrefillCosts(0.0, 0.0, chunk_tokens=chunk_tokens, prompts=1, cache_tokens=section.max_total_tokens),
        DecodeCosts(0.0, cache_tokens=section.max_total_tokens, max_batch_size=section.max_running_requests),
    )


HEAD = "# What engines cost, in seconds: docs/how-to/simulate.md explains the terms.\nmodels:\n"
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model, on what, and when."""

    profiled: ProfiledCosts
    amount: Amount
    engine: str
    date: str


def require_extensible(file: Path) -> None:
    """Raise ConfigError where `file` is there and profiles cannot be added to it, or where it cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written.", remedy="Name a file in a folder that is there.")
    if file.exists():
        load_profiles(file)
        with_entries(file.read_text(encoding="utf-8"), "models", {"profile": ""}, file)


def write_profile(file: Path, model: str, measured: Measured) -> None:
    """Put a model's profile in `file`, in the place of one it has there. Raises ConfigError."""
    write_entries(file, "models", {model: _entry(model, measured)}, HEAD)


def _entry(model: str, measured: Measured) -> str:
    """The lines of one model under `models:`, indented by two."""
    profiled, amount = measured.profiled, measured.amount
    costs = {
        part: rounded({name: one for name, one in terms.items() if one is not None}, DIGITS)
        for part, terms in asdict(profiled.costs).items()
    }
    errors = {
        "prefill": profiled.prefill_error,
        "first token": profiled.transfer_error,
        "decode": profiled.decode_error,
    }
    known = ", ".join(f"{what} {error:.1%}" for what, error in errors.items() if error is not None)
    comments = (
        f"measured {measured.date} on {measured.engine}: medians of {amount.rounds} rounds,",
        f"prompts of {', '.join(map(str, amount.lengths))} tokens, batches of {', '.join(map(str, amount.batches))}",
        f"mean relative error on what the costs were not fitted to: {known or 'not known, too little was timed'}",
    )
    return entry_text(model, costs, comments)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of engines that the deployment's file does not have; None keeps the known ones."""

    chunk_tokens: int | None = None
    prompts: int | None = None
    cache_tokens: int | None = None
    max_batch_size: int | None = None

    def of(self, known: PairCosts) -> PairCosts:
        """`known` with what is given here in its place. Raises ConfigError for a number below 1."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        prefill = {name: value for name, value in given.items() if name != "max_batch_size"}
        decode = {name: value for name, value in given.items() if name in ("cache_tokens", "max_batch_size")}
        return replace(known, prefill=replace(known.prefill, **prefill), decode=replace(known.decode, **decode))


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """A deployment's file, the models of it (all where there are none named), and where their profiles are written."""

    config: Path
    out: Path
    date: str
    models: Sequence[str] = ()
    amount: Amount = field(default_factory=Amount)
    limits: Limits = Limits()
    machine: str | None = None


async def run_profile(options: ProfileOptions, on_progress: Callable[[str], None]) -> None:
    """Start the deployment's engines, measure, and write each model's profile once it is known.

    `on_progress` gets a line per step. Raises ConfigError, if possible before anything starts, and EngineError.
    """
    require_extensible(options.out)
    config = load_config(options.config, os.environ, with_keys=False)
    async with profiled_models(config, options.models, options.config.stem, options.machine, on_progress) as models:
        for alias, model in models.items():
            limits = options.limits.of(model.limits)
            amount = options.amount.within(model.served.context_length, limits)
            on_progress(f"measuring {alias}: 1 round to warm up, {amount.rounds} that count")
            found = await measured(model, amount, limits)
            write_profile(options.out, alias, Measured(found, amount, model.engine, options.date))
            for line in _lines(alias, found):
                on_progress(line)


async def measured(model: ProfiledModel, amount: Amount, limits: PairCosts) -> ProfiledCosts:
    """The costs of a running model. Prompts are drawn by the system: engines may remember those of an earlier run."""
    return await profiled(
        model.served.engine,
        amount,
        limits,
        vocabulary=model.vocabulary,
        draws=random.Random(),
        clock=time.perf_counter,
    )


def _lines(alias: str, found: ProfiledCosts) -> Iterator[str]:
    prefill, decode, transfer = found.costs.prefill, found.costs.decode, found.costs.transfer
    for words, first_s, rest, error in (
        ("prefill {} a pass", prefill.forward_s, f"{1e6 * prefill.token_s:.3g} us a token", found.prefill_error),
        ("first token {} later", transfer.request_s, f"{1e6 * transfer.token_s:.3g} us a token", found.transfer_error),
        ("decode {} a step", decode.step_s, f"{1e6 * decode.sequence_s:.3g} us a sequence", found.decode_error),
    ):
        off = "" if error is None else f" (held out: off by {error:.1%})"
        yield f"{alias}: {words.format(f'{1e3 * first_s:.3g} ms')}, {rest}{off}"
