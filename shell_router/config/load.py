"""Read a deployment's file and its file of keys, and write their JSON Schema."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shell_router.config.deployment import Config
from shell_router.config.models import FromEnvironment, read_secret
from shell_router.config.settings import ApiKey, KeysFile
from shell_router.errors import ConfigError, require
from shell_router.files.document import Document, Problem
from shell_router.files.document import Path as Place
from shell_router.files.read import SEE_PAGE, check, load_document, problem_of, read_file
from shell_router.files.schema import Schema, json_schema

Kinds = Mapping[str, Callable[[], type]]
"""The class of each engine kind's settings, imported when it is called."""
NO_KINDS: Kinds = {}


def read_config(
    path: Path, environ: Mapping[str, str], *, with_keys: bool = True, kinds: Kinds = NO_KINDS
) -> Config:
    """Read a deployment's file, with API keys from the environment unless `with_keys` is off.

    Args:
        path: The deployment's file.
        environ: The environment that `${NAME}` and names of secrets are looked up in.
        with_keys: Whether API keys are read.
        kinds: The engine kinds that models may name.

    Raises:
        ConfigError: Its message begins with the file and, where known, the line.
    """
    document = load_document(path, SEE_PAGE, environ)
    config = _with_engines(document, path.parent, kinds)
    config = replace(config, embedder=config.embedder.resolve_from(path.parent))
    if not with_keys:
        return config

    def locate(place: Place) -> str:
        return f"{path}:{document.line_of(place)}"

    return replace(config, api_keys=_with_secrets(config.api_keys, locate, environ))


def _with_engines(document: Document, folder: Path, kinds: Kinds) -> Config:
    """Build the deployment, and the settings of its models' engine kinds by the kinds' classes."""
    value, sections = _split_engines(document.value, kinds)
    config, problems = check(
        Config, value, folder=folder, see=SEE_PAGE, schema=lambda: deployment_schema(kinds)
    )
    for alias, model in config.models.items() if config else ():
        if model.path == Path() and (alias, "openai") not in sections:
            where: Place = ("models", alias)
            problems.append(Problem(where, f"models.{alias} lacks 'path'.", "Add 'path'."))
    engines: dict[str, dict[str, Any]] = {}
    for (alias, name), section in sections.items():
        at = ("models", alias, name)
        settings, wrong = check(kinds[name](), section, at, folder=folder, see=SEE_PAGE)
        engines.setdefault(alias, {})[name] = settings
        problems += wrong
    document.require_none(problems)
    deployment: Config = config
    models = dict(deployment.models)
    place: Place = ()
    try:
        for alias, engine in engines.items():
            place = ("models", alias)
            models[alias] = replace(models[alias], engine=engine)
        place = ()
        return replace(deployment, models=models)
    except ConfigError as error:
        document.require_none([problem_of(error, place, SEE_PAGE)])
        raise


def _split_engines(value: Any, kinds: Kinds) -> tuple[Any, dict[tuple[str, str], Any]]:
    """Take the sections of engine kinds out of the models, by alias and kind."""
    models = value.get("models") if isinstance(value, Mapping) else None
    if not isinstance(models, Mapping):
        return value, {}
    others: dict[str, Any] = {}
    sections: dict[tuple[str, str], Any] = {}
    for alias, model in models.items():
        others[alias] = model
        if isinstance(model, Mapping):
            others[alias] = {key: item for key, item in model.items() if key not in kinds}
            present = [name for name in kinds if model.get(name) is not None]
            sections |= {(alias, name): model[name] for name in present}
    return {**value, "models": others}, sections


def deployment_schema(kinds: Kinds = NO_KINDS) -> Schema:
    """Write the JSON Schema of a deployment's file, with the sections of these engine kinds."""
    schema = json_schema(Config, "Shell router deployment")
    properties = schema["$defs"]["ModelSettings"]["properties"]
    for name, load in kinds.items():
        section = json_schema(load(), name)
        schema["$defs"] |= section.pop("$defs", {})
        del section["$schema"]
        properties[name] = {"anyOf": [section, {"type": "null"}], "default": None}
    return schema


def read_keys(config: Config, environ: Mapping[str, str]) -> Mapping[str, str | ApiKey]:
    """Return the deployment's API keys and those that its file of keys holds now.

    Raises:
        ConfigError: The file of keys is wrong, or names a key that the deployment's file has.
    """
    if config.api_keys_file is None:
        return config.api_keys
    file, locate = read_file(config.api_keys_file, KeysFile)
    twice = sorted(config.api_keys.keys() & file.api_keys.keys())
    require(
        not twice,
        f"{config.api_keys_file}: the deployment's own file has {twice} already.",
        "Rename them.",
    )
    return {**config.api_keys, **_with_secrets(file.api_keys, locate, environ)}


def _with_secrets(
    keys: Mapping[str, str | ApiKey],
    locate: Callable[[Place], str],
    environ: Mapping[str, str],
) -> Mapping[str, ApiKey]:
    """Look up the secret of each key, and require that no two keys share one."""
    read: dict[str, ApiKey] = {}
    owners: dict[str | None, str] = {}
    for name, entry in keys.items():
        place = locate(("api_keys", name))
        key = ApiKey(key=entry) if isinstance(entry, str) else entry
        source = key.key if key.env is None else FromEnvironment(key.env)
        text = read_secret(source, f"{place}: the API key of {name!r}", environ)
        owner = owners.setdefault(text, name)
        same = f"{place}: {owner!r} and {name!r} have the same API key."
        require(owner == name, same, "Give each tenant its own.")
        read[name] = replace(key, key=text, env=None)
    return read
