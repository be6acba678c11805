"""Asks running servers what they serve, and writes a deployment of them."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from shell_router import SHIPPED
from shell_router.core.marks import REASONING_PARSERS
from shell_router.errors import ConfigError
from shell_router.topology import AUTO

log = logging.getLogger(__name__)

TOPOLOGIES = SHIPPED / "topologies"
ANSWER_S = 10.0
"""The time in which a server says what it serves."""
MOST_MODELS = 16
"""Models of one OpenAI-compatible server; a provider may have hundreds."""
SHIPPED_NAMES = ("small", "medium", "large")
"""The models that the shipped topologies name, the smallest first."""

_NO_CHAT = re.compile(r"(?i)embed|rerank|minilm|(?<![a-z])bge-")
"""Names of models that do not chat, which Ollama and LM Studio list beside others."""
_PARAMETERS = re.compile(r"(?i)(?<![a-z0-9.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])")
_NO_ANSWER = (aiohttp.ClientError, TimeoutError, ValueError)

_NAME_API = "Start it, or name the URL before /chat/completions, which mostly ends with /v1."
_NAME_KEY = "Name the environment variable that holds its key with --openai-key-env."
_NAME_MODELS = "Name those that you want with --openai-model, which can be given several times."


@dataclass(frozen=True, slots=True)
class Api:
    """An OpenAI-compatible server; `key` names the variable that holds its key, the `secret`."""

    url: str
    key: str = ""
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An SGLang server, by its `/server_info`.

    Attributes:
        model: The name that it serves its model under.
        folder: The model's folder on this machine.
        mode: `prefill`, `decode`, or `null` for a server that does both.
        reasoning_parser: Its `--reasoning-parser`, if the router knows that.
    """

    url: str
    model: str
    folder: Path
    mode: str
    bootstrap_port: int
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of an OpenAI-compatible server; `key` names the variable that holds its key."""

    url: str
    model: str
    key: str = ""


Found = FoundEngine | FoundModel


async def ask_servers(
    engines: Sequence[str], apis: Sequence[Api] = (), chosen: Sequence[str] = ()
) -> list[Found]:
    """Ask SGLang's `engines` and OpenAI-compatible `apis` what they serve.

    Args:
        engines: Their URLs.
        apis: Their base URLs, each with its own key.
        chosen: The models of the `apis` to serve, instead of all.

    Raises:
        ConfigError: A server does not say what it serves, or none has a chosen model.
    """
    limit = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=limit) as client:
        found = await asyncio.gather(
            *(_ask_engine(client, url.rstrip("/")) for url in engines),
            *(_ask_api(client, api, chosen) for api in apis),
        )
    servers = [each for models in found for each in models]
    missing = {*chosen} - {each.model for each in servers if isinstance(each, FoundModel)}
    if missing:
        raise ConfigError(
            f"no --openai server lists the model {min(missing)!r}.",
            remedy="Name one that it lists: `curl URL/models` shows them.",
        )
    return servers


async def _get(
    client: aiohttp.ClientSession, url: str, headers: Mapping[str, str], remedy: str
) -> Any:
    try:
        async with client.get(url, headers=headers, raise_for_status=True) as answer:
            return await answer.json(content_type=None)
    except _NO_ANSWER as error:
        refused = isinstance(error, aiohttp.ClientResponseError) and error.status in (401, 403)
        raise ConfigError(
            f"{url} does not say what it serves: {_explain(error)}.",
            remedy=_NAME_KEY if refused and remedy == _NAME_API else remedy,
        ) from error


def _explain(error: Exception) -> str:
    match error:
        case aiohttp.ClientResponseError():
            return f"it answers with status {error.status} ({error.message})"
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return "nothing listens there"
        case TimeoutError():
            return f"no answer within {ANSWER_S:g} s"
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
            return "this is no URL that begins with http:// or https://"
        case ValueError():
            return "its answer is not JSON"
    return f"{type(error).__name__} {error}".rstrip()


async def _ask_engine(client: aiohttp.ClientSession, url: str) -> Sequence[Found]:
    remedy = (
        "Name the URL of a running SGLang server. One with a key needs a deployment file with "
        "engine_key; servers of other kinds go with --openai."
    )
    info = await _get(client, f"{url}/server_info", {}, remedy)
    fields = info if isinstance(info, dict) else {}
    path = str(fields.get("tokenizer_path") or fields.get("model_path") or "")
    if not path:
        raise ConfigError(f"{url}/server_info names no model_path.", remedy=remedy)
    name = Path(str(info.get("served_model_name") or path)).name
    mode = str(info.get("disaggregation_mode") or "null")
    folder = await asyncio.to_thread(_find_folder, path)
    if folder is None:
        if mode != "null":
            raise ConfigError(
                f"the tokenizer of {path!r} is not on this machine.",
                remedy="Copy the model's folder without its weights to the same path, or download "
                f"it: hf download {path} --exclude '*.safetensors'.",
            )
        log.warning(
            "the tokenizer of %r is not on this machine: %s is used by its OpenAI route, without "
            "incremental prefill and drafts",
            path,
            url,
        )
        return [FoundModel(f"{url}/v1", str(info.get("served_model_name") or path))]
    parser = info.get("reasoning_parser")
    port = int(info.get("disaggregation_bootstrap_port") or 0)
    known_parser = parser if parser in REASONING_PARSERS else None
    return [FoundEngine(url, name, folder, mode, port, known_parser)]


async def _ask_api(
    client: aiohttp.ClientSession, api: Api, chosen: Sequence[str]
) -> Sequence[Found]:
    url = api.url.rstrip("/")
    headers = {}
    if api.secret:
        headers["Authorization"] = f"Bearer {api.secret}"
    answer = await _get(client, f"{url}/models", headers, _NAME_API)
    models = answer.get("data") if isinstance(answer, dict) else None
    listed = [
        str(each["id"])
        for each in models or ()
        # another router says the kind, and lists topologies and embedders, too
        if isinstance(each, dict) and each.get("id") and each.get("kind", "model") == "model"
    ]
    if chosen:
        names = [name for name in chosen if name in listed or not listed]
        return [FoundModel(url, name, api.key) for name in names]
    names = [name for name in listed if not _NO_CHAT.search(name)]
    if len(names) < len(listed):
        without = ", ".join(sorted({*listed} - {*names}))
        log.warning("%s lists %s, left out: by their names they do not chat", url, without)
    if not 0 < len(names) <= MOST_MODELS:
        raise ConfigError(
            f"{url}/models lists {len(names)} models that chat, and without names 1 to "
            f"{MOST_MODELS} are served.",
            remedy=_NAME_MODELS,
        )
    return [FoundModel(url, name, api.key) for name in names]


def _find_folder(path: str) -> Path | None:
    """Return the folder of a model, also of one in the hub's cache; None if it is not here."""
    if Path(path).is_dir():
        return Path(path).resolve()
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def write_deployment(found: Sequence[Found], file: Path, topologies: str = str(TOPOLOGIES)) -> None:
    """Write a deployment of the servers, with the shipped topologies over their models.

    `topologies` is the folder of the shipped topologies, as the file names it.

    Beside models that give no log-probabilities, topologies that compare confidences are left out,
    and the tree goes without its early exit, in a file of its own beside `file`.

    Raises:
        ConfigError: A model has prefill servers and no decode server, or the reverse.
    """
    servers = _name_models(found)
    models = sorted(servers, key=_count_parameters)
    lines = ["# Written from what the servers said of themselves.", "models:"]
    for number, model in enumerate(models):
        lines += [f"  {json.dumps(model)}: &model{number}", *_write_model(servers[model])]
    lines.append("  # the names in the shipped topologies; large is the largest model")
    for place, name in enumerate(SHIPPED_NAMES):
        if name not in models:
            lines.append(f"  {name}: *model{place * (len(models) - 1) // 2}")
    files = [topologies]
    if any(isinstance(server, FoundModel) for server in found):
        files = [f"{topologies}/{name}" for name in _list_without_confidence()]
        files.append(_write_tree(file.parent).name)
    lines.append(f"topologies: {json.dumps(files)}")
    lines.append("listen: {ui: true} # the page of runs, at /ui")
    lines.append("live_topologies: {api: true} # the page may put topologies\n")
    file.write_text("\n".join(lines), encoding="utf-8")


def _name_models(found: Sequence[Found]) -> Mapping[str, Sequence[Found]]:
    """Return the servers of each model, by the name that requests choose it by.

    SGLang's servers of one name share a model; others with a name that is taken get a number. Of a
    name that is a path, as SGLang's and vLLM's may be, the last part counts.
    """
    taken = {AUTO, *(file.stem for file in TOPOLOGIES.glob("*.yaml"))}
    servers: dict[str, list[Found]] = {}
    for server in found:
        first = server.model
        if first.startswith("/"):
            first = Path(first).name
        name = first
        kinds = {type(server), *map(type, servers.get(name, ()))}
        number = 1
        while name in taken or (name in servers and kinds != {FoundEngine}):
            number += 1
            name = f"{first}-{number}"
        if name != server.model:
            log.warning("%s: its model %r is named %r here", server.url, server.model, name)
        servers.setdefault(name, []).append(server)
    return servers


def _list_without_confidence() -> Iterator[str]:
    for file in sorted(TOPOLOGIES.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        if "early_exit" not in text and "confidence" not in text:
            yield file.name


def _write_tree(folder: Path) -> Path:
    """Write the shipped tree without its early exit, and return its file."""
    tree = TOPOLOGIES / "tree-9-3-1.yaml"
    lines = tree.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not re.match(r"early_exit|#|description", line)]
    why = "# Without early exit, which compares confidences: for servers without `logprobs: on`."
    file = folder / tree.name
    file.write_text("\n".join([why, *kept, ""]), encoding="utf-8")
    return file


def _write_model(servers: Sequence[Found]) -> Iterator[str]:
    """Yield a model's settings as lines of YAML."""
    engines = [server for server in servers if isinstance(server, FoundEngine)]
    if not engines:
        settings = {"url": servers[0].url, "model": servers[0].model}
        yield f"    openai: {json.dumps(settings | _name_key(servers[0]))}"
        return
    yield f"    path: {json.dumps(str(engines[0].folder))}"
    if engines[0].reasoning_parser is not None:
        yield f"    reasoning_parser: {engines[0].reasoning_parser}"
    yield from _write_engines(engines)


def _name_key(server: Found) -> dict[str, Any]:
    if isinstance(server, FoundModel) and server.key:
        return {"key": {"env": server.key}}
    return {}


def _write_engines(engines: Sequence[FoundEngine]) -> Iterator[str]:
    prefill = [engine for engine in engines if engine.mode == "prefill"]
    decode = [engine for engine in engines if engine.mode == "decode"]
    undivided = [engine for engine in engines if engine.mode == "null"]
    if bool(prefill) != bool(decode) or (prefill and undivided):
        raise ConfigError(
            f"the servers of {engines[0].model!r} make no pairs: {len(prefill)} prefill, "
            f"{len(decode)} decode, {len(undivided)} do both.",
            remedy="Name at least one prefill and one decode server, or only servers that do both.",
        )
    yield "    pairs:" if prefill else "    servers:"
    for engine in undivided:
        yield f"      - {json.dumps(engine.url)}"
    for number in range(max(len(prefill), len(decode))):
        first, second = prefill[number % len(prefill)], decode[number % len(decode)]
        pair = {"prefill": first.url, "decode": second.url, "bootstrap_port": first.bootstrap_port}
        yield f"      - {json.dumps(pair)}"


def _count_parameters(model: str) -> float:
    """Return the number of parameters that a model's name gives; 0 if it gives none."""
    found = _PARAMETERS.search(model)
    if found is None:
        return 0
    return float(found[1]) * (1e9 if found[2] in "bB" else 1e6)
