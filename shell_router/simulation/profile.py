"""`shell-router profile`: a deployment's models measured one after the other, and written to a file of profiles."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shell_router.config import load_config
from shell_router.engines.simulated import PairCosts
from shell_router.simulation.profile_file import Measured, require_extensible, write_profile
from shell_router.simulation.profiling import Amount, ProfiledCosts, profiled
from shell_router.wiring.profiled import ProfiledModel, profiled_models


@dataclass(frozen=True, slots=True)
class Limits:
    """What is known of engines that the deployment's file does not tell; None keeps what is known otherwise."""

    chunk_tokens: int | None = None
    prompts: int | None = None
    cache_tokens: int | None = None
    at_once: int | None = None

    def of(self, known: PairCosts) -> PairCosts:
        """`known` with what is given here in its place. Raises ConfigError for a number below 1."""
        given = {
            name: value
            for name in ("chunk_tokens", "prompts", "cache_tokens")
            if (value := getattr(self, name)) is not None
        }
        decode = {name: value for name in ("cache_tokens", "at_once") if (value := getattr(self, name)) is not None}
        return replace(known, prefill=replace(known.prefill, **given), decode=replace(known.decode, **decode))


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


async def run_profile(options: ProfileOptions, tell: Callable[[str], None]) -> None:
    """Start the deployment's engines, measure, and write each model's profile once it is known.

    `tell` gets a line per step. Raises ConfigError, where it can be known before anything is started, and EngineError.
    """
    require_extensible(options.out)
    config = load_config(options.config, os.environ, with_keys=False)
    async with profiled_models(config, options.models, options.config.stem, options.machine, tell) as models:
        for alias, model in models.items():
            limits = options.limits.of(model.limits)
            amount = options.amount.within(model.served.context_length, limits)
            tell(f"measuring {alias}: 1 round to warm up, {amount.rounds} that count")
            found = await measured(model, amount, limits)
            write_profile(options.out, alias, Measured(found, amount, model.engine, options.date))
            for line in _lines(alias, found):
                tell(line)


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
    yield f"{alias}: prefill {_ms(prefill.forward_s)} a pass, {_us(prefill.token_s)} a token{_off(found.prefill_error)}"
    yield f"{alias}: first token {_ms(transfer.request_s)} later, {_us(transfer.token_s)} a token" + _off(
        found.transfer_error
    )
    yield f"{alias}: decode {_ms(decode.step_s)} a step, {_us(decode.sequence_s)} a sequence{_off(found.decode_error)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} us"


def _off(error: float | None) -> str:
    return "" if error is None else f" (held out: off by {error:.1%})"
