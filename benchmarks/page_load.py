"""How busy the live page keeps its browser's main thread while 40 agents stream 64 tokens per
second each.

    python benchmarks/page_load.py [--agents N] [--rate TOKENS_PER_S] [--seconds S] [--json]

Headless Chromium shows a run of a topology whose proposers all write at the same time, behind a
router and a scripted pair. Each row is a run, measured for some seconds in its middle by Chromium's
own counters (Performance.getMetrics):

    events        tokens that the engine sends in an event: 1, or as many as the router asks for
    tokens_per_s  tokens that reached the page, per agent
    busy          share of the time that the main thread spent in tasks, of which some may have
    waited for a core cpu           the same in CPU time
    layout        share that styles and layout took, of `busy`
    long_tasks    tasks above 50 ms

All parts share the machine's cores.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Row, report

if TYPE_CHECKING:
    from playwright.async_api import Browser, CDPSession, Page

MOST_BUSY = 0.3
WARM_S = 2.0
EVENTS = {"1": "stream_interval: 1, ", "as asked": ""}
DEPLOYMENT = """
listen: {{port: {port}, ui: true}}
models:
  small:
    path: {model}
    context_length: 131072
    pairs: [{{prefill: '{prefill}', decode: '{decode}'}}]
topologies: [page.yaml]
embedder: {{model: none}}
"""
TOPOLOGY = """
name: page
defaults: {{model: small, sampling: {{{interval}max_new_tokens: {tokens}, ignore_eos: true}}}}
early_exit: off
agents:
{leaves}
  root: {{precursors: [{names}], sampling: {{max_new_tokens: 1}}}}
"""
WATCH = """() => {
  window.longTasks = 0;
  new PerformanceObserver((list) => {
    window.longTasks += list.getEntries().length;
  }).observe({ type: "longtask" });
}"""


def main() -> None:
    """Measure and print."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--agents", type=int, default=40, help="agents that write at the same time (default 40)"
    )
    found.add_argument(
        "--rate", type=float, default=64.0, help="tokens per second of each (default 64)"
    )
    found.add_argument(
        "--seconds", type=float, default=8.0, help="how long each run is measured (default 8)"
    )
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    options = found.parse_args()
    if (chromium := shutil.which("chromium")) is None:
        found.error(
            "Chromium is missing. Install it with: apt-get install --no-install-recommends chromium"
        )
    rows = asyncio.run(measured(chromium, options.agents, options.rate, options.seconds))
    for row in rows:
        verdict = "met   " if row["busy"] < MOST_BUSY else "missed"
        print(
            f"{verdict}  events of {row['events']}: main thread {row['busy']:.1%} busy (goal: "
            f"under {MOST_BUSY:.0%})"
        )
    title = f"The live page while {options.agents} agents stream {options.rate:g} tokens/s each"
    report(
        title,
        rows,
        engine="scripted engine, headless Chromium",
        simulated=False,
        as_json=options.json,
    )


async def measured(chromium: str, agents: int, rate: float, seconds: float) -> list[Row]:
    """A row per size of events."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        rows = []
        for events, interval in EVENTS.items():
            async with _served(agents, rate, seconds, interval) as url:
                rows.append({"events": events, **await _measured(browser, url, agents, seconds)})
        await browser.close()
    return rows


@asynccontextmanager
async def _served(agents: int, rate: float, seconds: float, interval: str) -> AsyncIterator[str]:
    """A router with its page, in front of a scripted pair; both are processes of their own."""
    from benchmarks.random_checkpoint import make_checkpoint
    from benchmarks.router_overhead.setups import (
        RouterTarget,
        answering,
        free_ports,
        ours_command,
        running,
        running_engine,
        spread,
    )

    with tempfile.TemporaryDirectory(prefix="page-load-") as name:
        folder = Path(name)
        names = [f"agent-{number}" for number in range(1, agents + 1)]
        leaves = "\n".join(f"  {one}: {{}}" for one in names)
        tokens = int(rate * (seconds + 3 * WARM_S))
        text = TOPOLOGY.format(
            interval=interval, tokens=tokens, leaves=leaves, names=", ".join(names)
        )
        (folder / "page.yaml").write_text(text, encoding="utf-8")
        model = make_checkpoint(folder / "model", hidden=32, layers=1, heads=2, kv_heads=1)
        async with running_engine(spread(), folder, token_s=1 / rate) as (pair, _):
            (port,) = free_ports(1)
            text = DEPLOYMENT.format(
                port=port, model=model, prefill=pair.prefill_url, decode=pair.decode_url
            )
            (folder / "router.yaml").write_text(text, encoding="utf-8")
            url = f"http://127.0.0.1:{port}"
            with running(
                "router", ours_command(folder / "router.yaml", port), None, folder
            ) as router:
                await answering(RouterTarget(url), router)
                yield url


async def _measured(browser: "Browser", url: str, agents: int, seconds: float) -> Row:
    """Ask, and watch the middle of the run."""
    page = await browser.new_page(viewport={"width": 1440, "height": 900})
    await page.goto(f"{url}/ui")
    await page.select_option("#model", "page")
    await page.click("#go")
    await page.locator(".agent[data-state=decoding]").nth(agents - 1).wait_for()
    await page.evaluate(WATCH)
    await asyncio.sleep(WARM_S)
    sessions = {}
    for clock in ("timeTicks", "threadTicks"):  # wall-clock and CPU time
        sessions[clock] = await page.context.new_cdp_session(page)
        await sessions[clock].send("Performance.enable", {"timeDomain": clock})
    before = await _counted(page, sessions)
    await asyncio.sleep(seconds)
    after = await _counted(page, sessions)
    writing = await page.locator(".agent[data-state=decoding]").count()
    assert writing == agents, (
        f"{writing} of {agents} agents still wrote; the run was too short for the measurement"
    )
    spent = {name: after[name] - before[name] for name in after}
    await page.close()
    return {
        "tokens_per_s": spent["tokens"] / spent["Timestamp"] / agents,
        "busy": spent["TaskDuration"] / spent["Timestamp"],
        "cpu": spent["cpu"] / spent["Timestamp"],
        "layout": (spent["LayoutDuration"] + spent["RecalcStyleDuration"]) / spent["Timestamp"],
        "long_tasks": int(spent["long_tasks"]),
    }


async def _counted(page: "Page", sessions: "Mapping[str, CDPSession]") -> dict[str, float]:
    """Chromium's counters, in seconds, and the page's tokens and long tasks so far."""
    found = {}
    for clock, session in sessions.items():
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        found[clock] = {one["name"]: one["value"] for one in metrics}
    tokens = await page.evaluate(
        "sum(Object.values(stage.views[0].run.agents).map((one) => one.tokens))"
    )
    long_tasks = await page.evaluate("window.longTasks")
    return {
        **found["timeTicks"],
        "cpu": found["threadTicks"]["TaskDuration"],
        "tokens": tokens,
        "long_tasks": long_tasks,
    }


if __name__ == "__main__":
    main()
