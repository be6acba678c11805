"""The live page in a real browser, over scripted engines, and over the shipped models as a newcomer
starts them.
"""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from aiohttp import web

from benchmarks.scripted.server import ScriptedPair, ScriptedSettings
from shell_router.api import ApiSettings, add_page
from shell_router.app import serve_deployment
from shell_router.batch.api.routes import add_batches
from shell_router.batch.api.storage import open_folder
from shell_router.config import (
    BatchesSettings,
    Config,
    EmbedderSettings,
    Limits,
    Listen,
    ModelSettings,
    PairSettings,
)
from shell_router.early_exit.settings import EarlyExit
from shell_router.routing.holdout import Compared, Holdouts
from shell_router.topology import Agent, Cluster, Prompt, Topology
from tests.fakes.api_server import DUO, Api, BatchApi, api, client, line
from tests.fakes.command import ROOT, running_command
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Gates, Script

pytest.importorskip(
    "axe_playwright_python", reason="pip install -e '.[ci]'"
)  # the fast suite runs without
pytest.importorskip("playwright")
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    async_playwright,
    expect,
)

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: apt-get install --no-install-recommends chromium"
    ),
]
LIMIT_MS = 60_000
expect.set_options(timeout=LIMIT_MS)
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
EXITING = Topology(
    name="exiting",
    agents={
        **{name: Agent(name, "small") for name in "abc"},
        "root": Agent("root", "large", ("a", "b", "c"), Prompt(slot=" [{output}]")),
    },
    clusters=(Cluster("cluster-1", ("a", "b", "c"), EarlyExit("in_flight", threshold=0.6)),),
)
SKIPPING = replace(
    EXITING,
    name="skipping",
    clusters=(
        Cluster(
            "cluster-1",
            ("a", "b", "c"),
            EarlyExit("in_flight", threshold=0.6, skip_aggregation=True),
        ),
    ),
)
INHERITED = Topology(
    name="inherited",
    agents={
        "__proto__": Agent("__proto__", "small"),
        "constructor": Agent("constructor", "medium"),
        "valueOf": Agent("valueOf", "large", ("__proto__", "constructor")),
    },
)
FORTY = Topology(
    name="forty",
    agents={
        **{f"agent-{number}": Agent(f"agent-{number}", "small") for number in range(40)},
        "root": Agent("root", "large", tuple(f"agent-{number}" for number in range(40))),
    },
)
HOSTILE = (
    "<script>window.hacked=1</script></script><img src=x onerror='window.hacked=1'> "
    "<b>bold</b> $& ]]> end"
)


class Rounds:
    """A pace at which every request writes a piece in each round."""

    def __init__(self) -> None:
        self._begun = 0
        self._more = asyncio.Condition()

    async def begin(self, number: int) -> None:
        """Let all write up to this many pieces."""
        async with self._more:
            self._begun = number
            self._more.notify_all()

    async def pace(self, _rid: str, piece: int) -> None:
        """Wait for the piece's round. Prefill increments (piece -1) pass."""
        async with self._more:
            await self._more.wait_for(lambda: piece < self._begun)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--js-flags=--expose-gc"]
        )
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(
    browser: Browser, url: str, *, allowed: str = r"404", **options: object
) -> AsyncIterator[Page]:
    """The page in a tab of its own. Fails where it asked another host, or an error was logged that
    is not allowed.
    """
    async with await browser.new_context(viewport=WIDE, **options) as context:  # type: ignore[arg-type]
        hosts, errors = set[str](), list[str]()
        context.set_default_timeout(LIMIT_MS)
        context.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page = await watched(context, errors, allowed)
        await page.goto(f"{url}/ui")
        yield page
        assert hosts <= {urlsplit(url).netloc}
        assert not errors


async def watched(context: BrowserContext, errors: list[str], allowed: str) -> Page:
    """A new tab whose errors are collected."""

    def logged(message: ConsoleMessage) -> None:
        if message.type == "error" and not re.search(allowed, message.text):
            errors.append(message.text)

    page = await context.new_page()
    page.on("console", logged)
    page.on("pageerror", lambda error: errors.append(str(error)))
    return page


@asynccontextmanager
async def served(moa: ScriptedMoa | None = None, **fields: object) -> AsyncIterator[Api]:
    async with api(
        moa, extend=add_page, topologies=(DUO, EXITING, FORTY, INHERITED, SKIPPING), **fields
    ) as running:  # type: ignore[arg-type]
        yield running


async def ask(page: Page, model: str, other: str = "", question: str = "What is it?") -> None:
    """Send a question to one graph or two; the runs may still be under way."""
    await page.fill("#question", question)
    await page.select_option("#model", model)
    await page.select_option("#other", other)
    await page.click("#go")


async def ended(page: Page) -> None:
    await expect(page.locator("#go")).to_be_enabled()


def card(page: Page, agent: str) -> Locator:
    return page.locator(f'[data-agent="{agent}"]')


async def test_a_9_3_1_run_streams_to_its_end_and_compares_with_all_to_all(
    browser: Browser,
) -> None:
    async with running_command(
        "serve", "--config", "configs/embedded.yaml", "--port", "0"
    ) as command:
        url = (await command.line_with("Serving on", limit_s=180)).split()[-1]
        async with opened(browser, url) as page:
            await expect(page.locator("#health")).to_have_text("3 of 3 models ready")
            await ask(
                page,
                "tree-9-3-1",
                "all-to-all-9-9-1",
                "Tom has 24 pens. Tom buys 13 more pens. How many pens?",
            )
            await ended(page)
            tree, other = await page.locator(".run").all()
            for run, agents in ((tree, 13), (other, 19)):
                await expect(run.locator(".head .pill")).to_have_text("done")
                await expect(run.locator(".answer")).to_contain_text("Answer")
                await expect(run.locator(".agent")).to_have_count(agents)
                await expect(run.locator(".row")).to_have_count(agents)
                await expect(run.locator(".agent.critical >> nth=0")).to_be_visible()
                await expect(
                    run.locator(".agent:is([data-state=waiting], [data-state=decoding])")
                ).to_have_count(0)
            assert (
                await tree.locator(".axis").inner_text()
                == await other.locator(".axis").inner_text()
            )
            await expect(page.locator("#shown")).to_contain_text("In this one run")
            await expect(page.locator("#shown")).to_contain_text("times as long as tree-9-3-1")
            assert len(re.findall(r"[0-9a-f]{32}", page.url)) == 2


async def test_each_agents_text_and_state_is_seen_while_it_writes(browser: Browser) -> None:
    gates = Gates("right")
    moa = ScriptedMoa(
        {"left": "the left one says this", "right": "and the right one says that"}, pace=gates.pace
    )
    async with served(moa) as running, opened(browser, running.url) as page:
        await ask(page, "duo")
        await expect(card(page, "left")).to_contain_text("the left one says this")
        await expect(card(page, "left")).to_have_attribute("data-state", "finished")
        await expect(card(page, "right")).to_have_attribute("data-state", "prefilling")
        await expect(page.locator(".run .head .pill")).to_have_text("running")
        gates.open("right")
        await ended(page)
        await expect(card(page, "root")).to_have_attribute("data-state", "finished")
        await expect(card(page, "right")).to_have_class(re.compile("critical"))
        await card(page, "right").focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("Enter")
        await expect(page.locator("#detail")).to_contain_text("left, right")
        await page.keyboard.press("Escape")
        await expect(page.locator("#detail")).to_be_hidden()


async def test_early_exits_skipped_aggregations_and_accepted_drafts_are_seen_with_their_figures(
    browser: Browser,
) -> None:
    said = "2 plus 2 is 4 Answer: 4"
    scripts = {"a": Script(said, drafted_tokens=8, accepted_tokens=6), "b": said}
    async with (
        served(ScriptedMoa(scripts, pace=Gates("c").pace)) as running,
        opened(browser, running.url) as page,
    ):
        await ask(page, "exiting")
        await ended(page)
        await expect(card(page, "c")).to_have_attribute("data-state", "early_exit")
        await expect(card(page, "c")).to_contain_text("exited early")
        await expect(card(page, "root")).to_contain_text(re.compile(r"exit 0\.\d\d"))
        score = re.compile(
            r"cuts off c: 2 outputs, confidence 0\.\d\d, agreement 0\.\d\d, score 0\.\d\d; "
            r"an exit takes 0\.60"
        )
        await expect(page.locator(".log")).to_contain_text(score)
        await expect(page.locator(".row .cutoff")).to_have_count(1)
        await expect(card(page, "a")).to_contain_text("6/8 drafted")
        await expect(page.locator(".facts div", has_text="Drafts accepted")).to_contain_text(
            "75 %6 of 8 tokens"
        )

        await ask(page, "skipping")
        await ended(page)
        await expect(card(page, "root")).to_have_attribute("data-state", "skipped")
        await expect(card(page, "root")).to_contain_text(re.compile(r"exit 0\.\d\d · skipped"))
        await expect(card(page, "root")).to_have_class(re.compile("critical"))
        await expect(card(page, "c")).not_to_have_class(re.compile("critical"))
        await expect(card(page, "root")).to_contain_text(said)
        await expect(page.locator(".log")).to_contain_text(
            re.compile("root is skipped: it forwards the output of [ab]")
        )
        await expect(page.locator(".row .skip")).to_have_count(1)
        await expect(page.locator(".answer")).to_have_text(said)
        await expect(page.locator(".facts div", has_text="Agents")).to_contain_text("1 skipped")


async def test_what_hold_outs_show_of_a_topology_stands_among_its_runs_figures(
    browser: Browser,
) -> None:
    holdouts = Holdouts()
    saving = {
        Compared("incremental_prefill", "duo", "large, medium, small"): 0.5,
        Compared("incremental_prefill", "exiting", "large, small"): 0.5,
        Compared("drafts", "duo", "large", "root"): 0.25,
        Compared("drafts", "duo", "small", "proposer"): 0.0,
        Compared("drafts", "another", "medium", "proposer"): 0.5,
    }
    for key, saved in saving.items():
        for held_out in (False, True) * 4:
            holdouts.observe(
                key, held_out=held_out, seconds=1.0 if held_out else 1.0 - saved, now_s=0
            )
    async with served(holdouts=holdouts) as running, opened(browser, running.url) as page:
        await ask(page, "duo")
        await ended(page)
        without = page.locator(".facts div", has_text="without incremental prefill")
        twice = await page.evaluate("seconds(2 * stage.views[0].run.duration_s)")
        await expect(without).to_have_text(
            f"By the hold-outabout {twice}without incremental prefill"
        )
        drafts = page.locator(".facts div", has_text="less time per token")
        await expect(drafts).to_have_text(
            "Drafts, by the hold-outlarge root 25 %less time per token than without"
        )
        await ask(page, "exiting")  # too short for updates, so it took as long as without
        await ended(page)
        await expect(without).to_have_text("By the hold-out–without incremental prefill")
        await expect(drafts).to_have_count(0)


async def test_a_run_that_is_stopped_leaves_nothing_running(browser: Browser) -> None:
    moa = ScriptedMoa(pace=Gates("left").pace)
    async with served(moa) as running, opened(browser, running.url) as page:
        await ask(page, "duo")
        await expect(card(page, "right")).to_have_attribute("data-state", "finished")
        await page.click("#stop")
        await expect(page.locator(".run .head .pill")).to_have_text("stopped")
        async with asyncio.timeout(30):
            while moa.running:  # noqa: ASYNC110 - it lies behind a socket and sets no event
                await asyncio.sleep(0)


async def test_hostile_output_is_text_in_the_page_and_in_the_saved_file(
    browser: Browser, tmp_path: Path
) -> None:
    moa = ScriptedMoa(dict.fromkeys(("left", "right", "root"), HOSTILE))
    async with served(moa) as running, opened(browser, running.url) as page:
        await ask(page, "duo", question=HOSTILE)
        await ended(page)
        await expect(card(page, "left")).to_contain_text(HOSTILE)
        await expect(page.locator(".answer")).to_have_text(HOSTILE)
        assert await page.evaluate(
            "window.hacked === undefined && !document.querySelector('.run img, .run script')"
        )
        async with page.expect_download() as download:
            await page.click("#save")
        await (await download.value).save_as(tmp_path / "run.html")
    async with await browser.new_context() as context:
        errors, asked = list[str](), list[str]()
        context.on("request", lambda request: asked.append(request.url))
        saved = await watched(context, errors, r"(?!)")
        await saved.goto((tmp_path / "run.html").as_uri())
        await expect(saved.locator(".answer")).to_have_text(HOSTILE)
        await expect(card(saved, "left")).to_contain_text(HOSTILE)
        await expect(saved.locator(".bar.decode")).not_to_have_count(0)
        await expect(saved.locator("#ask")).to_be_hidden()
        assert await saved.evaluate("window.hacked === undefined")
        assert not [url for url in asked if not url.startswith(("file:", "data:"))]
        assert not errors


async def test_a_link_opens_a_run_and_that_of_another_client_from_its_trace(
    browser: Browser,
) -> None:
    async with served() as running, opened(browser, running.url) as page:
        await expect(page.locator("#recent")).to_have_text("None yet.")
        body = {"model": "duo", "messages": [{"role": "user", "content": "What?"}]}
        async with running.client.post(running.url + "/v1/chat/completions", json=body) as reply:
            trace = reply.headers["x-trace-id"]
        await expect(page.locator("#recent")).to_contain_text("3 agents")
        await page.locator(f'#recent a[href="#run={trace}"]').click()
        await expect(page.locator(".run .head .pill")).to_have_text("done")
        await page.reload()
        await expect(page.locator(".run .head .pill")).to_have_text("done")
        await expect(page.locator(".row")).to_have_count(3)
        await expect(page.locator(".question")).to_contain_text("The router keeps no texts.")
        await expect(page.locator(".answer")).to_be_hidden()
        await expect(page.locator("#question")).to_have_value("")
        await ask(page, "duo")
        await ended(page)
        await expect(page.locator(".answer")).to_contain_text("root speaks")
        await expect(page.locator("#recent")).to_contain_text("What is it?")
        async with page.expect_response(
            f"**/v1/traces/{trace}"
        ):  # comes after the reader has gone back
            await page.evaluate(f"location.hash = '#run={trace}'; history.back()")
        await page.evaluate(
            "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
        )
        await expect(page.locator(".answer")).to_contain_text("root speaks")
        await page.goto(f"{running.url}/ui#run={trace}")
        await expect(page.locator(".answer")).to_be_hidden()
        await page.go_back()
        await expect(page.locator(".answer")).to_contain_text("root speaks")
        await page.goto(f"{running.url}/ui#run=gone")
        await expect(page.locator("#problem")).to_contain_text("No trace 'gone' is held.")


async def test_two_topologies_are_compared_by_several_runs_each_with_their_spread(
    browser: Browser,
) -> None:
    async with served() as running, opened(browser, running.url) as page:
        await expect(page.locator("#times")).to_be_hidden()
        await page.select_option("#other", "exiting")
        await page.select_option("#times", "3")
        await ask(page, "duo", "exiting")
        await ended(page)
        measured = re.compile(r"^exiting took .* the median of 3 runs each, \d.*\d to \d.*\d$")
        await expect(page.locator("#shown")).to_have_text(measured)
        _, body = await running.get("/v1/traces")
        assert [one["model"] for one in body["data"]] == ["exiting", "duo"] * 3


async def test_recent_runs_of_programs_are_told_apart_by_program_and_agent(
    browser: Browser,
) -> None:
    body = {"program": "holiday", "agent": "planner", "model": "small", "prompt": ["Plan it."]}
    async with served() as running, opened(browser, running.url) as page:
        assert (await running.post("/v1/agent/requests", body))[0] == 200
        row = page.locator("#recent tr", has_text="agent request")
        await expect(row).to_contain_text("holiday / planner")


async def test_the_form_makes_room_for_the_run_and_comes_back_to_be_edited(
    browser: Browser,
) -> None:
    async with served() as running, opened(browser, running.url) as page:
        await expect(page.locator("#question")).to_have_value(re.compile("How many"))
        own = page.locator("#own")
        await ask(page, "duo")
        await ended(page)
        await expect(own).to_be_hidden()
        await page.click("#question")
        await expect(own).to_be_visible()


async def test_agents_may_have_the_names_of_what_every_object_has(browser: Browser) -> None:
    async with served() as running, opened(browser, running.url) as page:
        await ask(page, "inherited")
        await ended(page)
        for agent in INHERITED.agents:
            await expect(card(page, agent)).to_contain_text(f"{agent} speaks")
        await page.reload()  # from its trace
        await expect(page.locator(".agent[data-state=finished]")).to_have_count(3)


async def test_a_topology_of_the_readers_own_is_put_and_asked_and_a_wrong_one_is_refused_by_its_line(
    browser: Browser,
) -> None:
    async with served() as running, opened(browser, running.url, allowed="40[04]") as page:
        await page.click("#own summary")
        await expect(page.locator("#document")).to_have_value(
            re.compile("precursors: ")
        )  # of the models that there are
        for wrong, said in (
            ("agents: {a: {model: small}}", "has no name"),
            ("name: mine\nagents:\n  a: [", "mine.yaml:3"),
            ("name: mine\nagents:\n  a: {model: absent}", "agents.a.model"),
        ):
            await page.fill("#document", wrong)
            await page.click("#put-own")
            await expect(page.locator("#problem")).to_contain_text(said)
        await page.fill(
            "#document",
            "name: mine\nagents:\n  a: {model: small}\n  b: {model: large, precursors: [a]}",
        )
        await page.click("#put-own")
        await expect(page.locator("#model")).to_have_value("mine")
        await page.click("#go")
        await expect(card(page, "b")).to_contain_text("b speaks")
        assert running.services.topologies["mine"].root.id == "b"


async def test_a_link_that_the_browser_does_not_copy_is_to_be_copied_by_hand(
    browser: Browser,
) -> None:
    async with (
        served() as running,
        opened(browser, running.url, permissions=["geolocation"]) as page,
    ):  # no clipboard
        await ask(page, "duo")
        await ended(page)
        await page.click("#link")
        await expect(page.locator("#problem")).to_contain_text("Copy the address of this page.")


async def test_the_page_asks_for_a_key_and_keeps_it_in_its_tab(browser: Browser) -> None:
    settings = ApiSettings(keys={"me": "sk-1"})
    async with (
        served(settings=settings) as running,
        opened(browser, running.url, allowed="40[134]") as page,
    ):
        await page.fill("#key-field", "wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-field")).to_be_empty()
        await expect(page.locator("#key")).to_be_visible()
        await page.fill("#key-field", "sk-1")
        await page.keyboard.press("Enter")
        await expect(page.locator("#engines tr", has_text="small")).to_contain_text("serves")
        await ask(page, "duo")
        await ended(page)
        await expect(page.locator(".answer")).to_contain_text("root speaks")
        kept = "[localStorage.length, document.cookie, ...Object.values(sessionStorage)]"
        assert await page.evaluate(kept) == [0, "", "sk-1"]


async def test_a_dead_engine_shows(browser: Browser) -> None:
    servers = ScriptedSettings(vocabulary=30)
    async with ScriptedPair(servers) as there:
        pair = PairSettings(there.prefill.url, there.decode.url)
        models = {"small": ModelSettings(ROOT / "models" / "small", pairs=(pair,))}
        limits = Limits(engine_attempts=1, breaker_failures=1)
        listen = Listen(port=0, ui=True)
        async with (
            serve_deployment(
                Config(models, embedder=EmbedderSettings("none"), listen=listen, limits=limits)
            ) as url,
            opened(browser, url, allowed="404|50[23]") as page,
        ):
            row = page.locator("#engines tr", has_text="small decode")
            await expect(row).to_contain_text("serves")
            await there.decode.stop()
            await ask(page, "small")
            await expect(page.locator(".run .head .pill")).to_have_text("failed")
            await expect(page.locator(".answer .error")).not_to_be_empty()
            await expect(row).to_contain_text("breaker open, 1 failures")
            await expect(page.locator("#health")).to_have_text("0 of 1 models ready")


async def test_batches_show_their_progress(browser: Browser, tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:

        def extend(app: web.Application) -> None:
            add_batches(app, folder, BatchesSettings(), {})
            add_page(app)

        async with (
            api(extend=extend) as running,
            client(running, "none") as ai,
            opened(browser, running.url) as page,
        ):
            batch = await BatchApi(running, ai, tmp_path).begin(line("1"), line("2"))
            await expect(page.locator("#batches tr", has_text=batch.id)).to_contain_text("2 of 2")


async def test_a_router_that_is_gone_is_said_to_be(browser: Browser) -> None:
    async with (
        served() as running,
        opened(browser, running.url, allowed="404|ERR_CONNECTION") as page,
    ):
        await expect(page.locator("#model")).to_have_value("duo")
        await page.route("**/v1/models", lambda route: route.abort("connectionrefused"))
        await expect(page.locator("#problem")).to_contain_text("The router does not answer")
        await page.unroute("**/v1/models")
        await expect(page.locator("#problem")).to_be_hidden()


async def test_200_runs_leave_the_pages_memory_flat(browser: Browser) -> None:
    async with served() as running, opened(browser, running.url) as page:
        session = await page.context.new_cdp_session(page)

        async def used() -> tuple[int, int]:
            await page.evaluate(
                "refreshRecent().then(refreshRecent)"
            )  # the list before the last one is let go
            await session.send("HeapProfiler.collectGarbage")
            counts = await session.send("Memory.getDOMCounters")
            return (await session.send("Runtime.getHeapUsage"))["usedSize"], counts["nodes"]

        seen = []
        await ask(page, "duo")
        await ended(page)
        for _ in range(4):
            for _ in range(50):
                await page.click(
                    "#go"
                )  # typing would fill the browser's own memory of what can be undone
                await ended(page)
            seen.append(await used())
        (heap, nodes), (last_heap, last_nodes) = seen[0], seen[-1]
        # When the browser lets go of what was drawn anew is its own affair: the count varies by
        # about 100 nodes. A run is 180 nodes, so a page that kept its runs would hold 27,000 more
        # after these 150.
        assert last_nodes - nodes < 150 * 2, seen
        assert last_heap <= 1.15 * heap, seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_is_accessible(browser: Browser, scheme: str) -> None:
    moa = ScriptedMoa(
        {"a": "2 plus 2 is 4 Answer: 4", "b": "2 plus 2 is 4 Answer: 4"}, pace=Gates("c").pace
    )
    async with served(moa) as running, opened(browser, running.url, color_scheme=scheme) as page:
        await ask(page, "exiting")
        await ended(page)
        for viewport in (WIDE, NARROW):
            await page.set_viewport_size(viewport)  # type: ignore[arg-type]
            found = (await Axe().run(page)).response["violations"]
            assert not found, json.dumps(
                [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]
            )
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                "it scrolls sideways"
            )
            await expect(page.locator("#health")).to_be_visible()
        for table in ("#recent", "#engines"):
            assert await page.locator(table).evaluate("e => e.scrollWidth <= e.clientWidth")
        await card(page, "a").click()
        assert not (await Axe().run(page)).response["violations"]


async def test_what_40_agents_stream_moves_nothing_until_the_answer_is_whole(
    browser: Browser,
) -> None:
    rounds, words = (
        Rounds(),
        "incomprehensibilities characteristically notwithstanding misunderstandings",
    )
    moa = ScriptedMoa(dict.fromkeys(FORTY.agents, " ".join([words] * 5)), pace=rounds.pace)
    boxes = """[...document.querySelectorAll('.agent, .row, .facts, .log, #below')]
        .map(e => [e.offsetTop, e.offsetLeft, e.offsetWidth, e.offsetHeight].join())"""
    async with served(moa) as running, opened(browser, running.url) as page:
        await ask(page, "forty")
        await expect(page.locator(".agent")).to_have_count(41)
        await expect(page.locator(".run .head .pill")).to_have_text("running")
        before = await page.evaluate(boxes)
        for number in range(1, 5):
            await rounds.begin(number)
            tokens = re.compile(rf"· {number * len(words.split())}$")
            await expect(
                page.locator(".layer >> nth=0").locator(".state", has_text=tokens)
            ).to_have_count(40)
            assert await page.evaluate(boxes) == before
        await rounds.begin(5)
        await ended(page)
        fits = "e => e.scrollHeight <= e.clientHeight"
        assert await page.locator(".answer").evaluate(fits), "the whole answer shows at the end"
