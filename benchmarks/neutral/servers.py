"""The engines, and the servers under test in front of them: none, others' routers, this router."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.neutral.environments import Program, UnavailableError, install
from benchmarks.neutral.traces import Trace
from benchmarks.router_overhead.setups import Process, free_ports, ours_command, running

SERVED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Which public configurations use; the CPU's engines have this name."""
CPU_KINDS = ("undivided", "pair")
ENGINE_START_S, ROUTER_START_S = 1800.0, 300.0
ANSWER_LIMIT_S = 120.0
POLL_S = 0.5
ENGINE_OPTIONS = (
    *("--served-model-name", SERVED_NAME, "--max-total-tokens", "49152"),
    *("--dtype", "bfloat16"),  # the model's own
)
PEERS: Mapping[str, tuple[Program, Sequence[str]]] = {
    "sglang-router": (
        Program("sglang-router", "0.3.2", command="python"),
        ("-m", "sglang_router.launch_router"),
    ),
    "smg": (Program("smg"), ("launch",)),
}
"""Programs, and how each is called; they share their options. smg follows sglang-router."""
FORMS: Mapping[str, Mapping[str, Any]] = {
    "plain topology": {"incremental": False, "drafts": False},
    "topology": {"incremental": True, "drafts": False},
    "topology + drafts": {"incremental": True, "drafts": True},
}
"""How this router runs a trace's graph as one request."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines that run, of one model: undivided ones, or pairs' prefill and decode servers.

    Attributes:
        name: Of their kind, for the table.
        model: The name that they serve it under.
        tokenizer: The folder of its tokenizer.
        prefill: URL and bootstrap port of each prefill server.
    """

    name: str
    model: str
    tokenizer: Path
    undivided: Sequence[str] = ()
    prefill: Sequence[tuple[str, int]] = ()
    decode: Sequence[str] = ()

    @property
    def urls(self) -> list[str]:
        return [*self.undivided, *(url for url, _ in self.prefill), *self.decode]


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test; `form` says how it runs a trace as one request, if it does."""

    name: str
    url: str
    engines: Engines
    form: str = ""


@contextmanager
def cpu_engines(names: Sequence[str], folder: Path, *, drafts: bool) -> Iterator[list[Engines]]:
    """SGLang on the CPU with SmolLM2, undivided or a pair or both; stopped at the end."""
    from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
    from launch.sglang_cpu.pair import free_ports, make_pair, make_server, start_servers
    from launch.sglang_cpu.smollm2 import smollm2_folder

    venv = built_environment()
    if venv is None:
        raise SystemExit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    model = smollm2_folder(venv)
    found, started = [], []
    if "undivided" in names:
        place = folder / "undivided"
        server = make_server(
            "server", *free_ports(1), model, venv, place, options=ENGINE_OPTIONS, drafts=drafts
        )
        found.append(Engines("undivided", SERVED_NAME, model, [server.url]))
        started.append(server)
    if "pair" in names:
        pair = make_pair(model, venv, folder / "pair", options=ENGINE_OPTIONS, drafts=drafts)
        prefill = [(pair.prefill.url, pair.bootstrap_port)]
        found.append(Engines("pair", SERVED_NAME, model, (), prefill, [pair.decode.url]))
        started += [pair.prefill, pair.decode]
    try:
        start_servers(
            *started, limit_s=ENGINE_START_S, progress=lambda line: print(line, flush=True)
        )
        yield found
    finally:
        for engine in started:
            engine.stop()


async def running_engines(urls: Sequence[str]) -> list[Engines]:
    """Ask running SGLang servers what they are: undivided ones, pairs, or both."""
    from shell_router.app.discovery import FoundEngine, ask_servers

    servers = [each for each in await ask_servers(urls) if isinstance(each, FoundEngine)]
    if len(servers) < len(urls):
        raise SystemExit("All --engine must be SGLang servers whose model's folder is here.")
    model, folder = _ask_model(servers[0].url), servers[0].folder
    undivided = [each.url for each in servers if each.mode == "null"]
    prefill = [(each.url, each.bootstrap_port) for each in servers if each.mode == "prefill"]
    decode = [each.url for each in servers if each.mode == "decode"]
    found = []
    if undivided:
        found.append(Engines("undivided", model, folder, undivided))
    if prefill and decode:
        found.append(Engines("pair", model, folder, (), prefill, decode))
    if not found:
        raise SystemExit("A pair needs an --engine for its prefill and one for its decode server.")
    return found


def count_prompts(engines: Engines) -> tuple[int, int]:
    """Return how many tokens of prompts the engines have had so far, and how many were cached.

    Both are 0 for engines that run without `--enable-metrics`.
    """
    prompts = cached = 0
    for url in [*engines.undivided, *(url for url, _ in engines.prefill)]:
        with suppress(OSError):
            with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_LIMIT_S) as answer:
                text = answer.read().decode()
            prompts += sum_counter(text, "sglang:prompt_tokens_total")
            cached += sum_counter(text, "sglang:cached_tokens_total")
    return prompts, cached


def sum_counter(metrics: str, name: str) -> int:
    """Return a counter's sum over its labels, in Prometheus' text form."""
    counted = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
    return round(sum(map(float, counted)))


def _ask_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=ANSWER_LIMIT_S) as answer:
        return str(json.load(answer)["data"][0]["id"])


@contextmanager
def serve(
    engines: Engines,
    traces: Sequence[Trace],
    forms: Sequence[str],
    folder: Path,
    notes: dict[str, str],
) -> Iterator[list[Server]]:
    """Start every server under test before `engines`, each of which has answered a chat.

    Those that cannot be had are in `notes`, each with the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        servers = []
        if len(engines.undivided) == 1:
            _await_answer(engines.undivided[0], engines.model, None)
            servers.append(Server("the engine itself", engines.undivided[0], engines))
        else:
            notes[f"{engines.name}, the engine itself"] = "several servers need a router"
        for name, (program, arguments) in PEERS.items():
            try:
                installed = install(program)
                port, metrics_port = free_ports(2)
                command = [str(installed.executable), *arguments]
                command += _peer_options(engines, port, metrics_port)
                url = f"http://127.0.0.1:{port}"
                with ExitStack() as peer:  # one that answers nothing ends here
                    process = peer.enter_context(
                        running(f"{name}-{engines.name}", command, None, folder)
                    )
                    _await_answer(url, engines.model, process)
                    stack.enter_context(peer.pop_all())
            except (UnavailableError, RuntimeError, TimeoutError) as error:
                notes[f"{engines.name}, {name}"] = str(error)
                continue
            servers.append(Server(f"{name} {installed.version}", url, engines))
        (port,) = free_ports(1)
        config = _write_deployment(engines, traces, forms, folder)
        process = stack.enter_context(
            running(f"shell-router-{engines.name}", ours_command(config, port), None, folder)
        )
        url = f"http://127.0.0.1:{port}"
        _await_answer(url, engines.model, process)
        servers.append(Server("shell-router", url, engines))
        servers += [Server(f"shell-router, {form}", url, engines, form) for form in forms]
        yield servers


def _peer_options(engines: Engines, port: int, metrics_port: int) -> list[str]:
    """As shipped, but for the wait of its start and its log of every request."""
    if engines.undivided:
        options = ["--worker-urls", *engines.undivided]
    else:
        options = ["--pd-disaggregation"]
        for url, bootstrap_port in engines.prefill:
            options += ["--prefill", url, str(bootstrap_port)]
        for url in engines.decode:
            options += ["--decode", url]
    options += ["--host", "127.0.0.1", "--port", str(port)]
    options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    return [*options, "--log-level", "error", "--worker-startup-check-interval", "1"]


def _write_deployment(
    engines: Engines, traces: Sequence[Trace], forms: Sequence[str], folder: Path
) -> Path:
    """Write this router's deployment: the model by its name, and each trace's topologies."""
    topologies = []
    for trace in traces:
        for form in forms:
            if trace.agents is None:
                continue
            settings = FORMS[form]
            document = {
                "name": name_topology(trace, form),
                "agents": trace.agents,
                "prefill": {"incremental": settings["incremental"]},
                "defaults": {"drafts": settings["drafts"]},
            }
            file = folder / f"{document['name']}.yaml"
            file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
            topologies.append(str(file))
    model: dict[str, Any] = {"path": str(engines.tokenizer)}
    if engines.undivided:
        model["servers"] = [{"server": url} for url in engines.undivided]
    else:
        count = max(len(engines.prefill), len(engines.decode))
        model["pairs"] = [_pair(engines, number) for number in range(count)]
    deployment = {
        "models": {engines.model: model},
        "topologies": topologies,
        "embedder": {"model": "none"},
        "holdout": {"share": 0},
    }
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment, sort_keys=False), encoding="utf-8")
    return file


def _pair(engines: Engines, number: int) -> dict[str, Any]:
    prefill, bootstrap_port = engines.prefill[number % len(engines.prefill)]
    decode = engines.decode[number % len(engines.decode)]
    return {"prefill": prefill, "decode": decode, "bootstrap_port": bootstrap_port}


def name_topology(trace: Trace, form: str) -> str:
    """Return the model name of a trace's topology of that form."""
    return f"{trace.name}-{form.replace(' ', '-').replace('+', 'with')}"


def _await_answer(url: str, model: str, process: Process | None) -> None:
    """Return once a chat is answered; raises RuntimeError or TimeoutError with what is wrong."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    end_s = time.monotonic() + ROUTER_START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S):
                return
        except (urllib.error.URLError, OSError) as error:
            if process is not None:
                process.require_running()
            if time.monotonic() > end_s:
                raise TimeoutError(f"answers no chat: {error}") from None
        time.sleep(POLL_S)
