"""The adapters of a deployment's models: found on disk, and served as models of their own."""

import re
from collections.abc import Mapping

from shell_router.config import Config, ModelSettings
from shell_router.core.model import ServedModel
from shell_router.engines.adapters.model import AdaptedModel
from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.engines.pool import NO_ADAPTERS, PairPool
from shell_router.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
CONFIG = "adapter_config.json"


def adapters_of(alias: str, model: ModelSettings) -> AdapterSettings:
    """The model's adapters, which are the folders in its folder of adapters. Blocks. Raises ConfigError."""
    if model.adapters is None:
        return NO_ADAPTERS
    where, folder = f"models.{alias}.adapters.folder", model.adapters.folder
    if not folder.is_dir():
        raise ConfigError(
            f"{where}: there is no folder {folder}.",
            remedy="Name the folder that holds a folder per adapter; a relative path counts from the configuration's.",
        )
    found = {one.parent.name: one.parent.resolve() for one in sorted(folder.glob(f"*/{CONFIG}"))}
    if not found:
        raise ConfigError(
            f"{where}: no folder in {folder} holds an {CONFIG}.", remedy="Save each adapter there, in PEFT's form."
        )
    if wrong := [name for name in found if not NAME.fullmatch(name)]:
        raise ConfigError(
            f"{where}: an adapter's folder is named {wrong[0]!r}.",
            remedy="Take up to 100 letters, digits, '.', '_' or '-': requests name it behind the model and a colon.",
        )
    return model.adapters.of(found)


def model_names(config: Config) -> tuple[str, ...]:
    """Every name that topologies and requests may give a model, adapters included. Blocks. Raises ConfigError."""
    names = [*config.models]
    for alias, model in config.models.items():
        names += [named(alias, adapter) for adapter in adapters_of(alias, model).folders]
    if twice := sorted({name for name in names if names.count(name) > 1} & config.models.keys()):
        raise ConfigError(f"models.{twice[0]} is also the name of an adapter.", remedy="Rename one of them.")
    if unknown := sorted({*config.auto.models, *config.auto.max_batch} - set(names)):
        raise ConfigError(
            f"auto names {unknown[0]!r}, which is not among the models.",
            remedy=f"Name some of: {', '.join(sorted(names))}.",
        )
    return tuple(names)


def named(alias: str, adapter: str) -> str:
    """How requests name an adapter: as SGLang does."""
    return f"{alias}:{adapter}"


def adapted_models(base: ServedModel, pool: PairPool) -> Mapping[str, tuple[ServedModel, AdaptedModel]]:
    """The adapters of a running model as models by their names, each with what serves it."""
    found = {}
    for adapter in pool.adapters.settings.folders:
        name, engine = named(base.alias, adapter), AdaptedModel(pool, adapter)
        found[name] = ServedModel(name, engine, base.tokenizer, base.context_length, base.alias), engine
    return found
