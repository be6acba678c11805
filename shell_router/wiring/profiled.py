"""The models of a deployment as a profile wants them: one engine pair of each, and what that is limited to."""

import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from shell_router.config import Config, EmbeddedSection, ModelSettings
from shell_router.core.model import ServedModel
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.engines.simulated import DecodeCosts, PairCosts, PrefillCosts
from shell_router.errors import ConfigError
from shell_router.wiring.launched import launched_engines
from shell_router.wiring.launching import plan_launch
from shell_router.wiring.models import running_models


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A model on one pair, what serves it in words, and the pair's limits as costs that take no time."""

    served: ServedModel
    engine: str
    vocabulary: int
    limits: PairCosts


@asynccontextmanager
async def profiled_models(
    config: Config, aliases: Collection[str], name: str, machine: str | None, tell: Callable[[str], None]
) -> AsyncIterator[Mapping[str, ProfiledModel]]:
    """The models `aliases`, or all where it is empty, each on the first of its pairs; `tell` gets a line per step.

    Embedded pairs are started, and pairs with `launch`, on `machine`, as `shell-router launch` does under `name`;
    others are expected to run. Raises ConfigError and EngineError.
    """
    wanted = with_one_pair_each(config, aliases)
    async with AsyncExitStack() as stack:
        if any(pair.launch for model in wanted.models.values() for pair in model.pairs):
            planned = plan_launch(wanted, name, machine, os.environ)
            tell(f"starting {len(planned.engines)} engines; their logs are in {planned.folder}")
            await stack.enter_async_context(launched_engines(planned))
            wanted = planned.config
        running = await stack.enter_async_context(running_models(wanted, tell))
        yield {
            alias: ProfiledModel(model.served, model.engine, model.vocabulary, limits_of(wanted.models[alias]))
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
    """Those of an embedded pair as the deployment sets them; of others it says nothing, so SGLang's defaults."""
    if model.pairs:
        return PairCosts(PrefillCosts(0.0, 0.0), DecodeCosts(0.0))
    section = model.embedded or EmbeddedSection()
    chunk_tokens = EmbeddedSettings(model_path="").chunked_prefill_size
    return PairCosts(
        PrefillCosts(0.0, 0.0, chunk_tokens=chunk_tokens, prompts=1, cache_tokens=section.max_total_tokens),
        DecodeCosts(0.0, cache_tokens=section.max_total_tokens, at_once=section.max_running_requests),
    )
