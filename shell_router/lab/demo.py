"""The demo: three tiny models on this machine answer a few questions as a tree and as its baseline."""

from rich.console import Console

from shell_router import SHIPPED
from shell_router.batch.questions import is_right
from shell_router.lab.evaluation.client import Client, running_router
from shell_router.lab.evaluation.dataset import Item, read_items
from shell_router.lab.evaluation.run import evaluate, report_console, request_body
from shell_router.lab.evaluation.settings import EvaluationOptions, Setting
from shell_router.lab.timeline import draw_timeline

DEPLOYMENT = SHIPPED / "configs" / "evaluation.yaml"
QUESTIONS = SHIPPED / "models" / "data" / "test.jsonl"
COMPARED = ("all-to-all", "full")
"""The baseline is served as a layered client would: no prefill before all inputs have ended, no early exit."""


async def run_demo(rounds: int, seed: int) -> None:
    """Print what an evaluation of `rounds` questions prints, and where the time of one more went.

    `seed` fixes what the agents draw, and the early exits. Nothing is left running. Raises EngineError.
    """
    topologies = tuple(SHIPPED / "topologies" / "evaluation" / f"{name}.yaml" for name in COMPARED)
    options = EvaluationOptions(QUESTIONS, DEPLOYMENT, topologies, settings=COMPARED, seeds=(seed,))
    hard = [item for item in read_items(QUESTIONS) if item.facts["steps"] > 2]
    console = report_console()
    async with running_router(options, lambda step: console.print(f"  {step}", style="dim")) as (client, order):
        console.print("The models are tiny, but they really solve the questions, and all times are real.")
        console.print("Compared: all-to-all with no incremental prefill and no early exit; the tree with both.")
        await evaluate(client, order, hard[1 : 1 + rounds], options, console)
        for name in COMPARED:
            await _draw(client, Setting(name, "topology"), hard[0], options, console)


async def _draw(client: Client, setting: Setting, item: Item, options: EvaluationOptions, console: Console) -> None:
    """Ask, and print the answer and its timeline."""
    reply = await client.ask(request_body(setting, item, options.seeds[0], options))
    grade = "right" if is_right(reply.text, item.answer, item.grader) else "wrong"
    console.print(f"\n{setting.name}: {item.question}", style="bold")
    console.print(f"{reply.text} ({grade}, {reply.latency_s:.2f} s)")
    for line in draw_timeline(reply.trace, columns=min(console.width, 140)):
        console.print(line, no_wrap=True, crop=True)
    hidden = reply.trace["overlap"].get("overlap_share")
    if hidden is not None:
        console.print(f"{hidden:.0%} of the prefill was hidden behind agents that still wrote.")
