"""`shell-router profile`: a deployment's models measured one after the other, and written to a file of profiles."""

import os
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shell_router.app.launching import launched_engines, plan_launch
from shell_router.app.models import running_models
from shell_router.app.wings import load_config
from shell_router.config import Config, ModelSettings
from shell_router.config.write import write_measured
from shell_router.core.engine import ServedModel
from shell_router.errors import ConfigError
from shell_router.lab.simulation.profiling import Amount, ProfiledCosts, profiled
from shell_router.lab.simulation.settings import load_profiles
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


HEAD = "# What engines cost, in seconds: docs/how-to/simulate.md explains the terms.\n"


def require_extensible(file: Path) -> None:
    """Raise ConfigError where `file` is there and holds no profiles, or where it cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written.", remedy="Name a file in a folder that is there.")
    if file.exists():
        load_profiles(file)


def write_profile(file: Path, model: str, found: ProfiledCosts, amount: Amount, on: str) -> None:
    """Put a model's profile in `file`, in the place of one it has there; `on` says when and on what it was measured.

    Raises ConfigError.
    """
    lengths, batches = (", ".join(map(str, some)) for some in (amount.lengths, amount.batches))
    how = f"medians of {amount.rounds} rounds, prompts of {lengths} tokens, batches of {batches}"
    said = {"measured": f"{on}: {how}; {found.error_words}"}
    write_measured(file, "models", {model: {**said, **asdict(found.costs)}}, HEAD)


def limited(known: PairCosts, given: Mapping[str, int | None]) -> PairCosts:
    """`known` with the limits that are given in their place. Raises ConfigError for a number below 1."""
    prefill, decode = (
        {name: most for name, most in given.items() if most is not None and name in costs.__dataclass_fields__}
        for costs in (known.prefill, known.decode)
    )
    return replace(known, prefill=replace(known.prefill, **prefill), decode=replace(known.decode, **decode))


async def run_profile(
    file: Path,
    out: Path,
    models: Sequence[str],
    amount: Amount,
    limits: Mapping[str, int | None],
    machine: str | None,
    date: str,
    on_progress: Callable[[str], None],
) -> None:
    """Start the deployment of `file`, and measure its `models`, all where none is named; each profile goes to `out`.

    `limits` of engines that the file does not have stand in the place of known ones. Prompts are drawn by the system:
    engines may remember those of an earlier run. Raises ConfigError, if possible before anything starts, and
    EngineError.
    """
    require_extensible(out)
    config = load_config(file, os.environ, with_keys=False)
    async with profiled_models(config, models, file.stem, machine, on_progress) as running:
        for alias, model in running.items():
            known = limited(model.limits, limits)
            timed = amount.within(model.served.context_length, known)
            on_progress(f"measuring {alias}: 1 round to warm up, {timed.rounds} that count")
            vocabulary, draws, clock = model.vocabulary, random.Random(), time.perf_counter
            found = await profiled(model.served.engine, timed, known, vocabulary=vocabulary, draws=draws, clock=clock)
            write_profile(out, alias, found, timed, f"{date} on {model.engine}")
            for line in _lines(alias, found):
                on_progress(line)


def _lines(alias: str, found: ProfiledCosts) -> Iterator[str]:
    prefill, decode, transfer = found.costs.prefill, found.costs.decode, found.costs.transfer
    for words, first_s, rest, work in (
        ("prefill {} a pass", prefill.forward_s, f"{1e6 * prefill.token_s:.3g} us a token", "prefill"),
        ("first token {} later", transfer.request_s, f"{1e6 * transfer.token_s:.3g} us a token", "first token"),
        ("decode {} a step", decode.step_s, f"{1e6 * decode.sequence_s:.3g} us a sequence", "decode"),
    ):
        off = f" (held out: off by {found.errors[work]:.1%})" if work in found.errors else ""
        yield f"{alias}: {words.format(f'{1e3 * first_s:.3g} ms')}, {rest}{off}"
