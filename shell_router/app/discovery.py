"""Asks running servers what they serve, and writes a deployment of them."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from shell_router import SHIPPED
from shell_router.core.marks import REASONING_PARSERS
from shell_router.errors import ConfigError

ANSWER_S = 10.0
"""The time in which a server says what it serves."""
SHIPPED_NAMES = ("small", "medium", "large")
"""The models that the shipped topologies name, the smallest first."""

_PARAMETERS = re.compile(r"(?i)(?<![a-z0-9.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class FoundServer:
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


async def ask_servers(urls: Sequence[str]) -> list[FoundServer]:
    """Ask each server what it serves.

    Raises:
        ConfigError: One does not answer as SGLang does, or its model's files are not here.
    """
    limit = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=limit) as client:
        return [*await asyncio.gather(*(_ask_server(client, url.rstrip("/")) for url in urls))]


async def _ask_server(client: aiohttp.ClientSession, url: str) -> FoundServer:
    try:
        async with client.get(f"{url}/server_info", raise_for_status=True) as answer:
            info: dict[str, Any] = await answer.json(content_type=None)
        path = str(info.get("tokenizer_path") or info["model_path"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{url} does not say what it serves: {type(error).__name__} {error}".rstrip() + ".",
            remedy="Name the URL of a running SGLang server. One with a key needs a deployment "
            "file with engine_key.",
        ) from error
    parser = info.get("reasoning_parser")
    return FoundServer(
        url,
        model=Path(str(info.get("served_model_name") or path)).name,
        folder=await asyncio.to_thread(_find_folder, path),
        mode=str(info.get("disaggregation_mode") or "null"),
        bootstrap_port=int(info.get("disaggregation_bootstrap_port") or 0),
        reasoning_parser=parser if parser in REASONING_PARSERS else None,
    )


def _find_folder(path: str) -> Path:
    """Return the folder of a model, also of one in the hub's cache. Raises ConfigError."""
    if Path(path).is_dir():
        return Path(path).resolve()
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"the tokenizer of {path!r} is not on this machine.",
            remedy="Copy the model's folder without its weights to the same path, or download it: "
            f"hf download {path} --exclude '*.safetensors'.",
        ) from error


def write_deployment(servers: Sequence[FoundServer]) -> str:
    """Return a deployment of the servers as YAML, with the shipped topologies over their models.

    Raises:
        ConfigError: A model has prefill servers and no decode server, or the reverse.
    """
    engines: dict[str, list[FoundServer]] = {}
    for server in servers:
        engines.setdefault(server.model, []).append(server)
    models = sorted(engines, key=_count_parameters)
    lines = ["# Written from what the servers said of themselves.", "models:"]
    for number, model in enumerate(models):
        lines += [f"  {json.dumps(model)}: &model{number}", *_list_engines(engines[model])]
    lines.append("  # the names in the shipped topologies; large is the largest model")
    for place, name in enumerate(SHIPPED_NAMES):
        if name not in models:
            lines.append(f"  {name}: *model{place * (len(models) - 1) // 2}")
    lines += [
        f"topologies: [{json.dumps(str(SHIPPED / 'topologies'))}]",
        "listen: {ui: true} # the page of runs, at /ui",
        "live_topologies: {api: true} # the page may put topologies",
    ]
    return "\n".join(lines) + "\n"


def _list_engines(servers: Sequence[FoundServer]) -> Iterator[str]:
    """Yield a model's settings as lines of YAML."""
    prefill, decode, undivided = (
        [server for server in servers if server.mode == mode]
        for mode in ("prefill", "decode", "null")
    )
    yield f"    path: {json.dumps(str(servers[0].folder))}"
    if servers[0].reasoning_parser is not None:
        yield f"    reasoning_parser: {servers[0].reasoning_parser}"
    if bool(prefill) != bool(decode) or (prefill and undivided):
        raise ConfigError(
            f"the servers of {servers[0].model!r} make no pairs: {len(prefill)} prefill, "
            f"{len(decode)} decode, {len(undivided)} do both.",
            remedy="Name at least one prefill and one decode server, or only servers that do both.",
        )
    yield "    pairs:" if prefill else "    servers:"
    for server in undivided:
        yield f"      - {json.dumps(server.url)}"
    for number in range(max(len(prefill), len(decode))):
        first, second = prefill[number % len(prefill)], decode[number % len(decode)]
        yield f"      - prefill: {json.dumps(first.url)}"
        yield f"        decode: {json.dumps(second.url)}"
        yield f"        bootstrap_port: {first.bootstrap_port}"


def _count_parameters(model: str) -> float:
    """Return the number of parameters that a model's name gives; 0 if it gives none."""
    found = _PARAMETERS.search(model)
    if found is None:
        return 0
    return float(found[1]) * (1e9 if found[2] in "bB" else 1e6)
