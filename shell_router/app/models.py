"""Start the models of a deployment, each with its tokenizer and its engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from shell_router.app.model_files import ModelFiles, read_files
from shell_router.app.wings import EngineKind, Progress, StartedEngine, engine_kind, kind_of
from shell_router.config import Config, ModelSettings
from shell_router.config.models import name_adapter
from shell_router.core.budget import FREE
from shell_router.core.engine import Relay, ServedModel
from shell_router.core.marks import CALL_MARKS, REASONING_PARSERS, ReasoningMarks
from shell_router.engines.fleet import Fleet
from shell_router.engines.messages import CALL


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A model as requests see it, and its engine; token ids are below `vocabulary`."""

    served: ServedModel
    engine: StartedEngine
    vocabulary: int

    def list_adapted_models(self) -> Iterator[tuple[ServedModel, Relay]]:
        """Yield the model's LoRA adapters as models, each with its relay."""
        alias = self.served.alias
        for adapter, (engine, relay) in self.engine.adapters.items():
            name = name_adapter(alias, adapter)
            yield replace(self.served, alias=name, engine=engine, base=alias), relay


def engine_kinds(
    config: Config, kinds: Mapping[str, EngineKind] | None
) -> Mapping[str, EngineKind]:
    """Return the engine kinds that the models need, from `kinds` if given. Raises ConfigError.

    Call it before a process starts: a kind may name modules for the fork server to import.
    """
    return {name: (kinds or {}).get(name) or engine_kind(name) for name in _aliases_by_kind(config)}


def _aliases_by_kind(config: Config) -> Mapping[str, list[str]]:
    by_kind: dict[str, list[str]] = {}
    for alias, model in config.models.items():
        name = "swapping" if alias in config.swapped else kind_of(model)
        by_kind.setdefault(name, []).append(alias)
    return by_kind


@asynccontextmanager
async def run_models(
    config: Config, on_progress: Progress, kinds: Mapping[str, EngineKind] | None = None
) -> AsyncIterator[Mapping[str, RunningModel]]:
    """Start the engines of all models, and yield the models by alias.

    Args:
        config: The deployment.
        on_progress: Gets a line per step.
        kinds: Engine kinds, by name, that take precedence over ENGINE_KINDS.

    Raises:
        ConfigError: A file is wrong.
        EngineError: An engine does not come up.
    """
    by_kind = _aliases_by_kind(config)
    used = engine_kinds(config, kinds)
    async with AsyncExitStack() as stack:
        files = await asyncio.to_thread(read_files, config.models)
        engines: dict[str, StartedEngine] = {}
        for name, kind in used.items():
            files_of_kind = {alias: files[alias] for alias in by_kind[name]}
            running = kind.running(files_of_kind, config, on_progress)
            engines |= await stack.enter_async_context(running)
        models = {}
        for alias, model in config.models.items():
            served = _build_served(alias, model, engines[alias], files[alias])
            models[alias] = RunningModel(served, engines[alias], files[alias].vocabulary)
        yield models


def _build_served(
    alias: str, settings: ModelSettings, engine: StartedEngine, files: ModelFiles
) -> ServedModel:
    call_parser = settings.tool_call_parser
    served_parser = engine.call_parser and engine.call_parser.tool_parser
    if call_parser is None and served_parser is None:
        call_parser = files.infer_call_parser()
    model = ServedModel(
        alias,
        engine.engine,
        files.tokenizer,
        files.context_length,
        vocabulary=files.vocabulary,
        drafts=settings.drafts,
        reasoning=REASONING_PARSERS.get(settings.reasoning_parser or ""),
        call_mark=CALL_MARKS.get(call_parser or ""),
        call_parser=engine.call_parser,
        sampling=files.sampling,
        price=settings.price or FREE,
    )
    if engine.takes_messages:
        return replace(
            model,
            drafts=False,
            reasoning=model.reasoning or ReasoningMarks(),
            call_mark=CALL,
            takes_messages=True,
        )
    if engine.fleet is None:
        return model
    return with_prefill_of(model, engine.fleet)


def with_prefill_of(model: ServedModel, fleet: Fleet[Any]) -> ServedModel:
    """Return the model with the current cost and number of its prefill servers."""
    return replace(model, prefill_cost=fleet.prefill_cost, prefill_servers=fleet.prefill_servers)
