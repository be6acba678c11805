"""The requests of a running router: listed, drawn, or written for Perfetto and replayers."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from operator import itemgetter

import aiohttp
from rich.text import Text

from shell_router.core.exact_json import NewValues, Values
from shell_router.errors import ConfigError
from shell_router.lab.evaluation.client import RouterClient
from shell_router.lab.evaluation.report import CUT_OFF
from shell_router.telemetry.trace import split_messages

Trace = Values
Entry = NewValues
LIMIT_S = 30.0
PROCESS = 1
RUN_TRACK = 0
INSIDE_S = 1e-6
"""Before a slice's end: an arrow begins and ends in the slice that holds its time, and at its end a
slice is over.
"""


async def fetch_trace(url: str, api_key: str | None, trace_id: str) -> Trace:
    """Fetch a request's trace. Raises ShellRouterError."""
    async with aiohttp.ClientSession() as session:
        return await RouterClient(session, url, api_key=api_key, limit_s=LIMIT_S).trace(trace_id)


async def fetch_traces(url: str, api_key: str | None, filters: Mapping[str, str]) -> list[Trace]:
    """Fetch the latest requests' traces. Raises ShellRouterError."""
    async with aiohttp.ClientSession() as session:
        client = RouterClient(session, url, api_key=api_key, limit_s=LIMIT_S)
        return [await client.trace(row["id"]) for row in await client.traces(filters)]


async def list_rows(
    url: str, api_key: str | None, filters: Mapping[str, str]
) -> list[Mapping[str, str]]:
    """List the latest requests, the last first, as rows of a table. Raises ShellRouterError."""
    async with aiohttp.ClientSession() as session:
        listed = await RouterClient(session, url, api_key=api_key, limit_s=LIMIT_S).traces(filters)
    return [
        {
            "id": row["id"],
            "model": row["model"],
            "began (UTC)": f"{datetime.fromtimestamp(row['created'], UTC):%Y-%m-%d %H:%M:%S}",
            "status": row["status"],
            "ms": "" if row["duration_ms"] is None else f"{row['duration_ms']:,.0f}",
            "agents": str(row["agents"]),
        }
        for row in listed
    ]


def to_perfetto(trace: Trace) -> Entry:
    """Return the trace as Chrome's JSON: a track per agent, and an arrow from output to reader."""
    return {"traceEvents": list(_Tracks(trace).entries()), "displayTimeUnit": "ms"}


def to_otel(traces: Sequence[Trace]) -> Entry:
    """Return the requests' calls as spans that inference-perf, guidellm and `simulate` replay.

    An output stands in the prompts of its readers as an assistant's message of its own. Agents
    that did not finish are left out, and the agents of a program are one trace.

    Raises:
        ConfigError: A trace has no contents, has not ended, or reads what another request wrote.
    """
    outputs = _collect_outputs(traces)
    spans = [span for trace in traces for span in _list_calls(trace, outputs[_name_graph(trace)])]
    spans.sort(key=itemgetter("start_time"))
    return {"trace_id": "+".join(outputs), "span_count": len(spans), "spans": spans}


def _collect_outputs(traces: Sequence[Trace]) -> Mapping[str, Mapping[str, str]]:
    """Return what agents wrote that others could read, by graph and agent."""
    outputs: dict[str, dict[str, str]] = defaultdict(dict)
    for trace in reversed(traces):  # the latest is the first, and an agent may have been sent again
        if trace["duration_s"] is None:
            raise ConfigError(
                f"Request {trace['id']} still runs.", remedy="Wait for its end, or list others."
            )
        written = outputs[_name_graph(trace)]
        for agent, record in trace["agents"].items():
            is_read = record["state"] in ("finished", "skipped")
            output = record.get("output", "") if is_read else ""
            written[agent] = output or written.get(agent, "")
        if "agent" in trace:  # a topology may answer for it
            written[trace["agent"]] = written.get(trace["overlap"]["critical_path"][-1], "")
    return outputs


def _name_graph(trace: Trace) -> str:
    name: str = trace.get("program") or trace["id"]
    return name


def _list_calls(trace: Trace, outputs: Mapping[str, str]) -> Iterator[Entry]:
    """Yield a span for each agent whose model finished its output."""
    for agent, record in trace["agents"].items():
        sent = [span for span in record["spans"] if span["name"] == "prefill"]
        if not sent or not record["decoded_tokens"] or record["state"] != "finished":
            continue
        _require_contents(trace["id"], record, outputs)
        yield build_call(
            _name_graph(trace),
            agent,
            split_messages(record["messages"], outputs),
            record["output"],
            (
                sent[-1]["prompt_tokens"],
                record.get("completion_tokens", record["decoded_tokens"]),
            ),
            (
                datetime.fromtimestamp(trace["started_at"] + sent[-1]["start_s"], UTC),
                datetime.fromtimestamp(trace["started_at"] + record["ended_s"], UTC),
            ),
            record["model"],
        )


def _require_contents(id: str, record: Values, outputs: Mapping[str, str]) -> None:
    if "messages" not in record:
        raise ConfigError(
            f"The trace of request {id} has no texts.",
            remedy="Set traces.contents: on in the deployment's file, and ask again.",
        )
    for message in record["messages"]:
        for piece in message["content"]:
            if isinstance(piece, dict) and piece["output_of"] not in outputs:
                raise ConfigError(
                    f"Request {id} reads {piece['output_of']!r}, which another request wrote.",
                    remedy="Leave the id out, and list all requests of the program.",
                )


def build_call(
    trace: str,
    agent: str,
    messages: Sequence[Values],
    output: str,
    tokens: tuple[int, int],
    times: tuple[datetime, datetime],
    model: str = "model",
) -> Entry:
    """Return a call's span; `tokens` are those of its prompt and its output."""
    return {
        "trace_id": trace,
        "span_id": agent,
        "parent_span_id": None,
        "name": f"chat {model}",
        "kind": "SPAN_KIND_CLIENT",
        "start_time": times[0].isoformat(),
        "end_time": times[1].isoformat(),
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": model,
            "gen_ai.input.messages": json.dumps(messages),
            "gen_ai.output.text": output,
            "gen_ai.usage.input_tokens": tokens[0],
            "gen_ai.usage.output_tokens": tokens[1],
        },
        "status": {"code": 1, "message": ""},
    }


class _Tracks:
    """Times are microseconds of Unix time, as the format has them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._agents: Mapping[str, Values] = trace["agents"]
        self._numbers = {agent: number for number, agent in enumerate(self._agents, RUN_TRACK + 1)}
        ends = [
            span["end_s"] or span["start_s"]
            for record in self._agents.values()
            for span in record["spans"]
        ]
        self._end_s: float = (
            max(ends, default=0.0) if trace["duration_s"] is None else trace["duration_s"]
        )

    def entries(self) -> Iterator[Entry]:
        trace = self._trace
        yield self._name("process_name", RUN_TRACK, f"{trace['target']} {trace['id']}")
        yield self._name("thread_name", RUN_TRACK, "run")
        yield self._slice(RUN_TRACK, trace["target"], 0.0, None, {"state": trace["state"]})
        for scored in trace["exits"]:
            facts = {
                name: scored[name]
                for name in ("confidence", "agreement", "probability", "exited", "aborted")
            }
            yield self._slice(
                RUN_TRACK,
                f"early exit {scored['cluster']}",
                scored["start_s"],
                scored["end_s"],
                facts,
            )
        for agent, record in self._agents.items():
            number = self._numbers[agent]
            yield self._name(
                "thread_name", number, f"{agent} ({record['model']}, {record['state']})"
            )
            for span in record["spans"]:
                facts = {
                    key: fact
                    for key, fact in span.items()
                    if key not in ("name", "start_s", "end_s")
                }
                yield self._slice(number, span["name"], span["start_s"], span["end_s"], facts)
        yield from self._draw_arrows()

    def _draw_arrows(self) -> Iterator[Entry]:
        ids = count(1)
        for agent, record in self._agents.items():
            for precursor, read_s in _list_inputs(record):
                written = [
                    span
                    for span in self._agents.get(precursor, {}).get("spans", ())
                    if span["name"] == "decode"
                ]
                if written and written[-1]["end_s"] is not None:
                    leaves_s = max(written[-1]["start_s"], written[-1]["end_s"] - INSIDE_S)
                    facts = {"cat": "output", "name": f"output of {precursor}", "id": next(ids)}
                    yield {"ph": "s", **facts, **self._at(self._numbers[precursor], leaves_s)}
                    yield {"ph": "f", "bp": "e", **facts, **self._at(self._numbers[agent], read_s)}

    def _slice(
        self, track: int, name: str, start_s: float, end_s: float | None, facts: Values
    ) -> Entry:
        """Build a slice; one that has not ended is drawn to the trace's end."""
        begins = self._at(track, start_s)
        ends = self._at(track, self._end_s if end_s is None else end_s)
        return {
            "ph": "X",
            "cat": "run",
            "name": name,
            "dur": ends["ts"] - begins["ts"],
            "args": facts,
            **begins,
        }

    def _at(self, track: int, at_s: float) -> Entry:
        return {"pid": PROCESS, "tid": track, "ts": round(1e6 * (self._trace["started_at"] + at_s))}

    def _name(self, kind: str, track: int, name: str) -> Entry:
        return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": name}}


def _list_inputs(record: Values) -> Iterator[tuple[str, float]]:
    """Yield the agents whose outputs the agent read or forwarded, and when."""
    if record["state"] == "skipped":
        yield record["source"], max(record["started_s"], record["ended_s"] - INSIDE_S)
    for prompt in (span for span in record["spans"] if span["name"] == "prefill"):
        yield from ((precursor, prompt["start_s"]) for precursor in record["precursors"])


PAINT: Mapping[str, tuple[str, str]] = {
    "queue": ("·", "dim"),
    "prefill_increment": ("▒", "cyan"),
    "prefill": ("▓", "yellow"),
    "decode": ("█", "green"),
}
"""Per kind of span its character and colour, later ones painted over earlier ones."""

LEGEND = (
    "· nothing to send yet   ▒ prefill while precursors still write",
    "▓ queue and prefill on the engine, once all input is there",
    "█ decode   ✂ cut off early   » skipped   ⇉ share that drafts gave",
)


def draw_timeline(trace: Trace, *, columns: int, until_s: float = 0.0) -> Iterator[Text]:
    """Draw a line per agent, precursors first, then the axis and a legend."""
    agents: Mapping[str, Values] = trace["agents"]
    ends = [span["end_s"] or 0.0 for record in agents.values() for span in record["spans"]]
    duration_s = max([until_s, trace["duration_s"] or 0.0, *ends])
    margin = max(map(len, agents), default=0) + 2
    width = max(20, columns - margin - 8)
    for agent, record in agents.items():
        line = Text(agent.ljust(margin))
        line.append_text(draw_bar(record["spans"], duration_s, width))
        line.append(" ✂" if record["state"] in CUT_OFF else "", "red")
        line.append(" »" if record["state"] == "skipped" else "", "green")
        if accepted := record.get("accepted_tokens"):
            line.append(f" ⇉{accepted / record['completion_tokens']:.0%}", "green")
        yield line
    yield Text(" " * margin + draw_axis(duration_s, width), "dim")
    for words in LEGEND:
        yield Text(" " * margin + words, "dim")


def draw_bar(spans: Sequence[Values], duration_s: float, width: int) -> Text:
    """Paint the spans on `width` cells for `duration_s`, each on at least one."""
    cells = [(" ", "")] * width
    for kind, paint in PAINT.items():
        for span in spans:
            if span["name"] == kind and span["end_s"] is not None:
                first, last = (
                    _draw_cell(span[end], duration_s, width) for end in ("start_s", "end_s")
                )
                cells[first : last + 1] = [paint] * (last + 1 - first)
    line = Text()
    for character, style in cells:
        line.append(character, style)
    return line


def draw_axis(duration_s: float, width: int) -> str:
    """Five marks from 0 to `duration_s`."""
    marks = [" "] * (width + 8)
    for quarter in range(5):
        label = f"{duration_s * quarter / 4:.{1 if duration_s >= 1 else 2}f}s"
        at = quarter * (width - 1) // 4
        marks[at : at + len(label)] = label
    return "".join(marks).rstrip()


def _draw_cell(at_s: float, duration_s: float, width: int) -> int:
    if duration_s > 0:
        return min(width - 1, max(0, int(at_s / duration_s * width)))
    return 0
