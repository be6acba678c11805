"""Public load generators: how each is called, unmodified, and what it says it measured."""

import json
import os
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import yaml

from benchmarks.neutral.environments import Installed, Program

RUN_LIMIT_S = 3600.0
REQUEST_LIMIT_S = 600.0
REASON_CHARACTERS = 300
PROMPT_TOKENS = 200
OUTPUT_TOKENS = 32
"""The lengths of single chats."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One run of a client.

    Attributes:
        url: The server's, without `/v1`.
        model: The name that requests have.
        tokenizer: The folder of the model's tokenizer.
        sessions: How many there are, or chats where a session is one.
        at_once: How many of them run at a time.
        seed: Of the client's random numbers; servers of one round get the same. aiperf's prompts
            follow from it; inference-perf draws the marks of its sessions anew.
        trace: The file to replay; None for chats.
        root: The span id of the trace's last call.
    """

    url: str
    model: str
    tokenizer: Path
    sessions: int
    at_once: int
    seed: int
    trace: Path | None = None
    root: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a client measured in one run, of the sessions that succeeded.

    `first_token_s` are the seconds from a session's begin to the first token of its last answer.
    The engines count `prompt_tokens`, and those that were cached.
    """

    session_s: Sequence[float]
    first_token_s: Sequence[float]
    output_tokens: int
    wall_s: float
    failures: int
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Client(ABC):
    """A load generator. Subclasses name the program, its options and its result files."""

    program: ClassVar[Program]
    replays: ClassVar[bool]
    """Whether it replays traces; else it sends chats of its own."""

    def run(self, installed: Installed, ask: Ask, folder: Path) -> Measured:
        """Run it, with all that it writes in `folder`; a run that fails has only failures."""
        folder.mkdir(parents=True)
        command = [str(installed.executable), *self.options(ask, folder)]
        log = folder / "output.log"
        try:
            if _run(command, log, self.environment()):
                printed = re.sub(r"[\s\u2500-\u257f]+", " ", log.read_text("utf-8", "replace"))
                reason = printed.strip()[-REASON_CHARACTERS:] or "it failed without a word"
            else:
                return self.read(ask, folder / "results")
        except (subprocess.SubprocessError, OSError, ValueError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]
        return Measured([], [], 0, 0.0, ask.sessions, reason)

    def environment(self) -> Mapping[str, str]:
        """The client's environment variables: ours, without what is for our own Python."""
        left_out = ("PYTHONPATH", "HF_HUB_OFFLINE")  # aiperf loads no tokenizer with the latter
        return {key: value for key, value in os.environ.items() if key not in left_out}

    @abstractmethod
    def options(self, ask: Ask, folder: Path) -> Sequence[str]:
        """Its command line after the executable; it may write files to `folder`."""

    @abstractmethod
    def read(self, ask: Ask, results: Path) -> Measured:
        """What its result files say."""


class InferencePerf(Client):
    """Kubernetes' inference-perf. Sessions are copies of a trace with texts of their own."""

    program = Program("inference-perf", "0.7.0", python=(3, 12))
    replays = True

    def options(self, ask: Ask, folder: Path) -> Sequence[str]:
        """Write its configuration."""
        per_request = {"request": False, "response": False, "response_chunks": False}
        replay = {
            "trace_files": [str(ask.trace)],
            "use_static_model": True,
            "static_model_name": ask.model,
            "inject_random_session_id": True,  # a session finds nothing of another one cached
            "duplicate_sessions_target": ask.sessions,
            "max_wait_ms": 0,  # tools and people of the trace take no time
            "tool_choice_mode": "as_recorded",
            "override_tool_call_max_tokens": False,
        }
        stage = {"concurrent_sessions": ask.at_once, "num_sessions": ask.sessions}
        configuration = {
            "api": {"type": "chat", "streaming": True, "session_id_header_key": "x-session-id"},
            "server": {
                "type": "sglang",
                "base_url": ask.url,
                "model_name": ask.model,
                "ignore_eos": True,
            },
            "tokenizer": {"pretrained_model_name_or_path": str(ask.tokenizer)},
            "data": {"type": "otel_trace_replay", "otel_trace_replay": replay},
            "load": {
                "type": "trace_session_replay",
                "num_workers": 1,
                "base_seed": ask.seed,
                "request_timeout": REQUEST_LIMIT_S,
                "stages": [stage],
            },
            "report": {
                "request_lifecycle": {"per_request": True, "per_request_fields": per_request},
                "session_lifecycle": {"per_session": True},
            },
            "storage": {"local_storage": {"path": str(folder / "results")}},
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
        return ["--config_file", str(file)]

    def read(self, ask: Ask, results: Path) -> Measured:
        """Read what it reports of each session and of each request.

        Requests do not name their session: sessions and root requests are matched by their ends.
        """
        sessions = _read_json(results / "per_session_lifecycle_metrics.json")
        requests = _read_json(results / "per_request_lifecycle_metrics.json")
        done = [session for session in sessions if session["success"]]
        done.sort(key=itemgetter("end_time"))
        roots = [
            request
            for request in requests
            if request["error"] is None
            and request["info"]["graph_event_id"].endswith(f"_{ask.root}")
        ]
        roots.sort(key=itemgetter("end_time"))
        if len(roots) != len(done):
            raise ValueError(f"{len(roots)} root requests of {len(done)} sessions")
        first_token_s = [
            session["duration_sec"] - (root["end_time"] - _first_token(root))
            for session, root in zip(done, roots, strict=True)
        ]
        began = min(session["start_time"] for session in sessions)
        ended = max(session["end_time"] for session in sessions)
        return Measured(
            [session["duration_sec"] for session in done],
            first_token_s,
            sum(session["total_output_tokens"] for session in done),
            ended - began,
            ask.sessions - len(done),
            str(next((session["error"] for session in sessions if session["error"]), "")),
        )


def _first_token(request: Mapping[str, Any]) -> float:
    times = request["info"]["response_metrics"]["output_token_times"]
    return float(times[0] if times else request["end_time"])


class Aiperf(Client):
    """NVIDIA's aiperf: single chats, each a session of its own."""

    program = Program("aiperf", "0.13.0", python=(3, 12))
    replays = False

    def options(self, ask: Ask, folder: Path) -> Sequence[str]:
        """Random texts of fixed lengths."""
        lengths = {
            "--synthetic-input-tokens-mean": PROMPT_TOKENS,
            "--synthetic-input-tokens-stddev": 0,
            "--output-tokens-mean": OUTPUT_TOKENS,
            "--output-tokens-stddev": 0,
        }
        return [
            "profile",
            *("--model", ask.model, "--tokenizer", str(ask.tokenizer), "--url", ask.url),
            *("--endpoint-type", "chat", "--streaming", "--extra-inputs", "ignore_eos:true"),
            *("--concurrency", str(ask.at_once), "--request-count", str(ask.sessions)),
            *(str(word) for pair in lengths.items() for word in pair),
            *("--random-seed", str(ask.seed), "--request-timeout-seconds", str(REQUEST_LIMIT_S)),
            *("--output-artifact-dir", str(folder / "results"), "--ui", "none"),
        ]

    def read(self, ask: Ask, results: Path) -> Measured:
        """Read its record of each request."""
        lines = (results / "profile_export.jsonl").read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        done = [record["metrics"] for record in records if not record.get("error")]
        began = min(record["metadata"]["request_start_ns"] for record in records)
        ended = max(record["metadata"]["request_end_ns"] for record in records)
        return Measured(
            [metrics["request_latency"]["value"] / 1e3 for metrics in done],
            [metrics["time_to_first_token"]["value"] / 1e3 for metrics in done],
            sum(int(metrics["usage_completion_tokens"]["value"]) for metrics in done),
            (ended - began) / 1e9,
            ask.sessions - len(done),
            str(next((record["error"] for record in records if record.get("error")), "")),
        )


CLIENTS: Sequence[Client] = (InferencePerf(), Aiperf())


def _run(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Return the exit status; nothing that the command started runs on."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env=environment,
            start_new_session=True,
        ) as child,
    ):
        try:
            return child.wait(RUN_LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
