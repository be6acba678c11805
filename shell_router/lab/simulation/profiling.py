"""The measuring of a deployment's models, one after the other, for `shell-router profile`.

A model's requests are timed on an engine that has nothing else to do, through the router's own
contract. Every round times all kinds of requests once, so that a machine whose speed drifts slows
all of them; the first round warms up. The median of each kind counts.
"""

import asyncio
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Container,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path

from shell_router.app.launching import launch_engines, plan_launch
from shell_router.app.models import run_models
from shell_router.app.wings import load_config
from shell_router.config import Config, ModelSettings
from shell_router.core.engine import Engine, Generation, ServedModel, Tokens
from shell_router.core.statistics import Timing, fit_costs, measure_held_out_error
from shell_router.errors import ConfigError
from shell_router.files.write import write_measured
from shell_router.lab.simulation.settings import load_profiles
from shell_router.standins.embedded.settings import EmbeddedSection, EmbeddedSettings
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    PairCosts,
    PrefillCosts,
    TransferCosts,
    attended_pairs,
)

DRAWN = {"temperature": 0.7, "top_p": 0.95}
"""As most agents sample: on a small model drawing a token takes a good part of a step."""
Clock = Callable[[], float]
Arrivals = Sequence[tuple[float, int]]
"""When tokens of one output came, and how many had come by then."""


@dataclass(frozen=True, slots=True)
class Amount:
    """The amount of timing: prompts of `lengths`, `batches` of `new_tokens`, and `rounds`."""

    lengths: Sequence[int] = (32, 128, 512, 1024, 2048)
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    new_tokens: int = 64
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, least in (("lengths", 3), ("batches", 1)):
            values = getattr(self, name)
            if len(set(values)) < least or min(values) < 1:
                raise ConfigError(
                    f"{name} must be {least} different numbers or more, all of them above 0, "
                    "not "
                    f"{values}.",
                    remedy=f"Name them as in --{name} 32,128,512.",
                )
        if self.new_tokens < 8 or self.rounds < 1:
            raise ConfigError(
                "A profile takes 8 new tokens or more and a round or more.", remedy="Raise them."
            )

    def limit_to(self, context_length: int, limits: PairCosts) -> "Amount":
        """Return the part that fits the model and engines. Raises ConfigError for too little."""
        capacity = min(context_length, limits.prefill.cache_tokens, limits.decode.cache_tokens)
        batches = tuple(
            sorted({size for size in self.batches if size <= limits.decode.max_batch_size})
        )
        written = self.new_tokens + max(batches, default=0)
        lengths = tuple(sorted({size for size in self.lengths if size + written < capacity}))
        if len(lengths) < 3 or not batches:
            raise ConfigError(
                f"{capacity} tokens of context and batches of {limits.decode.max_batch_size} "
                "leave too little to time.",
                remedy="Name shorter --lengths or smaller --batches.",
            )
        return Amount(lengths, batches, self.new_tokens, self.rounds)


def build_prefill_timing(cached: int, new: int, seconds: float, limits: PrefillCosts) -> Timing:
    """`new` tokens were prefilled behind `cached` ones, alone on the engine."""
    terms = (ceil(new / limits.chunk_tokens), new, attended_pairs(new, cached))
    return Timing((cached, new), terms, seconds)


def build_decode_timing(sequences: int, context: int, steps: int, seconds: float) -> Timing:
    """Build the timing of `steps` of a batch with `context` tokens at the beginning."""
    grown = sequences * steps * (steps - 1) / 2
    return Timing(sequences, (steps, steps * sequences, steps * context + grown), seconds)


def fit_terms(what: str, timings: Sequence[Timing], least: int, option: str) -> list[float]:
    """Fit the costs of the timings' terms.

    Raises ConfigError for fewer than `least` different timings.
    """
    if (different := len({timing.terms for timing in timings})) < least:
        raise ConfigError(
            f"{what} cannot be fitted to {different} different timings; it takes {least}.",
            remedy=f"Name more with {option}.",
        )
    return fit_costs(timings)


@dataclass(frozen=True, slots=True)
class ProfiledCosts:
    """A pair's costs, and the mean relative error per kind of work on held-out timings."""

    costs: PairCosts
    errors: Mapping[str, float]


def fit_pair(
    prefills: Sequence[Timing],
    firsts: Sequence[Timing],
    decodes: Sequence[Timing],
    limits: PairCosts,
) -> ProfiledCosts:
    """Fit a pair's costs to timings, with `limits`. Raises ConfigError for too few."""
    forward_s, token_s, attention_s = fit_terms("Prefill", prefills, 3, "--lengths")
    transfer = TransferCosts(*fit_terms("The transfer", firsts, 2, "--lengths"))
    step_s, sequence_s, context_s = fit_terms("Decoding", decodes, 3, "--batches and --lengths")
    errors = {
        "prefill": measure_held_out_error(prefills, least=3),
        "first token": measure_held_out_error(firsts),
        "decode": measure_held_out_error(decodes),
    }
    return ProfiledCosts(
        PairCosts(
            replace(limits.prefill, forward_s=forward_s, token_s=token_s, attention_s=attention_s),
            replace(limits.decode, step_s=step_s, sequence_s=sequence_s, context_s=context_s),
            transfer,
        ),
        {what: error for what, error in errors.items() if error is not None},
    )


async def profile_engine(
    engine: Engine,
    amount: Amount,
    limits: PairCosts,
    *,
    vocabulary: int,
    draws: random.Random,
    clock: Clock,
) -> ProfiledCosts:
    """Measure the costs of an idle engine; `limits` are kept but for their times.

    Prompts are drawn from ids below `vocabulary`. Raises ConfigError for too few timings, and
    EngineError.
    """
    timings = Timings(engine, amount, limits, vocabulary, draws, clock)
    for _ in range(1 + amount.rounds):
        await timings.round()
    return timings.fit()


@dataclass(slots=True)
class Timings:
    """The rounds of timed requests to an engine, by kind of request."""

    engine: Engine
    amount: Amount
    limits: PairCosts
    vocabulary: int
    draws: random.Random
    clock: Clock
    _requests: int = 0
    _warm: bool = False
    _prefills: dict[tuple[int, int], list[Timing]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _firsts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _decodes: dict[tuple[int, int], list[Timing]] = field(default_factory=lambda: defaultdict(list))
    _kept: dict[Hashable, list[list[int]]] = field(default_factory=dict)

    def fit(self) -> ProfiledCosts:
        """Fit the costs as far as they are known. Raises ConfigError for too few timings."""
        prefills = {place: _choose_middle(timed) for place, timed in self._prefills.items()}
        firsts = [
            Timing(length, (1, length), statistics.median_low(timed), prefills[0, length].seconds)
            for length, timed in self._firsts.items()
        ]
        return fit_pair(
            [*prefills.values()],
            firsts,
            [*map(_choose_middle, self._decodes.values())],
            self.limits,
        )

    async def round(self) -> None:
        """Time all kinds once; the first round warms up and is forgotten."""
        await self._time_all()
        if not self._warm:
            self._warm = True
            for timed in (self._prefills, self._firsts, self._decodes):
                timed.clear()

    async def _time_all(self) -> None:
        shortest, *longer = self.amount.lengths
        for length in self.amount.lengths:
            await self._prefill([], length)
            begun_s = self.clock()
            await self._note_arrivals(self._request(self._draw_prompt(length)))
            self._firsts[length].append(self.clock() - begun_s)
        for before in longer:
            prefix = self._draw_prompt(before - shortest)
            await self.engine.prefill(self._request(prefix))
            await self._prefill(prefix, shortest)
        for sequences in self.amount.batches:
            for length in self._choose_lengths(sequences):
                await self._decode(sequences, length)

    async def _prefill(self, prefix: Sequence[int], new: int) -> None:
        request = self._request([*prefix, *self._draw_prompt(new)])
        begun_s = self.clock()
        done = await self.engine.prefill(request)
        seconds = self.clock() - begun_s
        # what the engine found, which need not be what was there: a cache has pages, or does not
        # keep what is prefilled
        new_tokens = done.prompt_tokens - done.cached_tokens
        timing = build_prefill_timing(done.cached_tokens, new_tokens, seconds, self.limits.prefill)
        self._prefills[len(prefix), new].append(timing)

    async def _decode(self, sequences: int, length: int) -> None:
        """Time a batch whose prompts were prefilled, so that all sequences begin together."""
        prompts = self._kept.setdefault(
            (sequences, length), [self._draw_prompt(length) for _ in range(sequences)]
        )
        for prompt in prompts:
            await self.engine.prefill(self._request(prompt))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._note_arrivals(
                        self._request(prompt, new_tokens=self.amount.new_tokens + sequences)
                    )
                )
                for prompt in prompts
            ]
        timing = find_joint_steps([task.result() for task in tasks], length)
        if timing is not None:
            self._decodes[sequences, length].append(timing)

    def _choose_lengths(self, sequences: int) -> Sequence[int]:
        """Return the shortest, middle and longest lengths that fit into the KV cache together."""
        each = self.limits.decode.cache_tokens // sequences - self.amount.new_tokens - sequences
        fitting = [length for length in self.amount.lengths if length <= each]
        if fitting:
            return sorted({fitting[0], fitting[len(fitting) // 2], fitting[-1]})
        return ()

    async def _note_arrivals(self, request: Generation) -> Arrivals:
        arrivals = []
        come = 0
        async with aclosing(self.engine.generate(request)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    come += len(event.ids)
                    arrivals.append((self.clock(), come))
        return arrivals

    def _request(self, ids: Sequence[int], new_tokens: int = 1) -> Generation:
        self._requests += 1
        rid = f"profile-{self.draws.getrandbits(64):016x}-{self._requests:08d}"
        return Generation(rid, ids, {"max_new_tokens": new_tokens, "ignore_eos": True, **DRAWN})

    def _draw_prompt(self, tokens: int) -> list[int]:
        """Fresh ids from the middle of the vocabulary: special tokens stand at either end."""
        return self.draws.choices(
            range(self.vocabulary // 4, max(1 + self.vocabulary // 4, 3 * self.vocabulary // 4)),
            k=tokens,
        )


def find_joint_steps(outputs: Sequence[Arrivals], prompt_tokens: int) -> Timing | None:
    """Return the steps that a batch made while all its sequences decoded; None if it made none.

    They are counted on the sequence that ended first, from its first tokens after all others had
    begun.
    """
    if not all(outputs):
        return None
    all_begun_s = max(arrivals[0][0] for arrivals in outputs)
    leader = min(outputs, key=lambda arrivals: arrivals[-1][0])
    counted = [(at_s, come) for at_s, come in leader if at_s > all_begun_s]
    if len(counted) < 2:
        return None
    (begun_s, begun), (ended_s, ended) = counted[0], counted[-1]
    written = [max(come for came_s, come in arrivals if came_s <= begun_s) for arrivals in outputs]
    context = len(outputs) * prompt_tokens + sum(written)
    return build_decode_timing(len(outputs), context, ended - begun, ended_s - begun_s)


def _choose_middle(timings: Sequence[Timing]) -> Timing:
    """Return the timing of the median seconds per first term, which are passes or steps.

    Of two in the middle it is the lower.
    """
    return sorted(timings, key=lambda timing: timing.seconds / timing.terms[0])[
        (len(timings) - 1) // 2
    ]


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A model on a pair, its engine in words, and the limits as costs that take no time."""

    served: ServedModel
    engine: str
    vocabulary: int
    limits: PairCosts


@asynccontextmanager
async def start_models(
    config: Config,
    aliases: Collection[str],
    name: str,
    machine: str | None,
    on_progress: Callable[[str], None],
) -> AsyncIterator[Mapping[str, ProfiledModel]]:
    """Yield the models `aliases`, or all if it is empty, each on its first pair.

    `on_progress` gets a line per step. Embedded pairs, and pairs with `launch`, are started on
    `machine`, as `shell-router launch` does under `name`; others must run. Raises ConfigError and
    EngineError.
    """
    kept = keep_one_pair_each(config, aliases)
    async with AsyncExitStack() as stack:
        if any(at.launch for model in kept.models.values() for at in model.sglang):
            planned = plan_launch(kept, name, machine, os.environ)
            on_progress(
                f"starting {len(planned.engines)} engines; their logs are in {planned.folder}"
            )
            await stack.enter_async_context(launch_engines(planned))
            kept = planned.config
        running = await stack.enter_async_context(run_models(kept, on_progress))
        yield {
            alias: ProfiledModel(
                model.served, model.engine.name, model.vocabulary, read_limits(kept.models[alias])
            )
            for alias, model in running.items()
        }


def keep_one_pair_each(config: Config, aliases: Collection[str]) -> Config:
    """Return the deployment with these models, or all if `aliases` is empty, each on one pair.

    An engine that ends stays down: a restarted one was not measured. Raises ConfigError.
    """
    if unknown := sorted(set(aliases) - config.models.keys()):
        raise ConfigError(
            f"The deployment has no model {', '.join(unknown)}.",
            remedy=f"Choose from: {', '.join(config.models)}.",
        )
    models = {
        alias: replace(model, pairs=model.pairs[:1], servers=model.servers[:1])
        for alias, model in config.models.items()
        if alias in aliases or not aliases
    }
    return replace(config, models=models, launch=replace(config.launch, restart_limit=0))


def read_limits(model: ModelSettings) -> PairCosts:
    """Return an embedded pair's limits in the deployment, or SGLang's defaults."""
    if model.sglang:
        return PairCosts(PrefillCosts(0.0, 0.0), DecodeCosts(0.0))
    section = model.engine.get("embedded") or EmbeddedSection()
    chunk_tokens = EmbeddedSettings(model_path="").chunked_prefill_size
    return PairCosts(
        PrefillCosts(
            0.0, 0.0, chunk_tokens=chunk_tokens, prompts=1, cache_tokens=section.max_total_tokens
        ),
        DecodeCosts(
            0.0, cache_tokens=section.max_total_tokens, max_batch_size=section.max_running_requests
        ),
    )


HEAD = "# What engines cost, in seconds: docs/how-to/evaluate.md explains the terms.\n"


def require_extensible(file: Path) -> None:
    """Raise ConfigError if `file` holds no profiles, or cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(
            f"{file} cannot be written.", remedy="Name a file in a folder that is there."
        )
    if file.exists():
        load_profiles(file)


def write_profile(file: Path, model: str, profiled: ProfiledCosts, amount: Amount, on: str) -> None:
    """Put a model's profile into `file`, in the place of an earlier one. Raises ConfigError.

    `on` says when and on what it was measured.
    """
    lengths, batches = (", ".join(map(str, some)) for some in (amount.lengths, amount.batches))
    how = f"medians of {amount.rounds} rounds, prompts of {lengths} tokens, batches of {batches}"
    errors = ", ".join(f"{what} {error:.1%}" for what, error in profiled.errors.items())
    off = (
        "mean relative error on what the costs were not fitted to: "
        f"{errors or 'not known, too little was timed'}"
    )
    profile = {"measured": f"{on}: {how}; {off}", **asdict(profiled.costs)}
    write_measured(file, "models", {model: profile}, HEAD)


def replace_limits(costs: PairCosts, limits: Mapping[str, int | None]) -> PairCosts:
    """Return `costs` with the given limits. Raises ConfigError for a limit below 1."""

    def choose(names: Container[str]) -> dict[str, int]:
        return {name: most for name, most in limits.items() if most is not None and name in names}

    return replace(
        costs,
        prefill=replace(costs.prefill, **choose(PrefillCosts.__dataclass_fields__)),
        decode=replace(costs.decode, **choose(DecodeCosts.__dataclass_fields__)),
    )


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
    """Start the deployment of `file`, measure `models` or all, and write each profile to `out`.

    `limits` replace known ones for engines that the file does not have. Prompts are drawn by the
    system: engines may remember those of an earlier run. Raises ConfigError, if possible before
    anything starts, and EngineError.
    """
    require_extensible(out)
    config = load_config(file, os.environ, with_keys=False)
    async with start_models(config, models, file.stem, machine, on_progress) as running:
        for alias, model in running.items():
            limits_of_pair = replace_limits(model.limits, limits)
            timed = amount.limit_to(model.served.context_length, limits_of_pair)
            on_progress(f"measuring {alias}: 1 round to warm up, {timed.rounds} that count")
            profiled = await profile_engine(
                model.served.engine,
                timed,
                limits_of_pair,
                vocabulary=model.vocabulary,
                draws=random.Random(),
                clock=time.perf_counter,
            )
            write_profile(out, alias, profiled, timed, f"{date} on {model.engine}")
            for line in _describe_costs(alias, profiled):
                on_progress(line)


def _describe_costs(alias: str, profiled: ProfiledCosts) -> Iterator[str]:
    prefill = profiled.costs.prefill
    decode = profiled.costs.decode
    transfer = profiled.costs.transfer
    for work, first_s, each, second_s, unit in (
        ("prefill", prefill.forward_s, "a pass", prefill.token_s, "token"),
        ("first token", transfer.request_s, "later", transfer.token_s, "token"),
        ("decode", decode.step_s, "a step", decode.sequence_s, "sequence"),
    ):
        off = ""
        if work in profiled.errors:
            off = f" (held out: off by {profiled.errors[work]:.1%})"
        yield (
            f"{alias}: {work} {1e3 * first_s:.3g} ms {each}, {1e6 * second_s:.3g} us a {unit}{off}"
        )
