"""An evaluation from start to end: the order of asking, the requests, the tables and the files."""

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shell_router.core.exact_json import NewValues, Values, write_line
from shell_router.errors import ConfigError, ShellRouterError, UnknownModel
from shell_router.files.read import suggest
from shell_router.lab.evaluation.client import RouterClient, connect_router
from shell_router.lab.evaluation.grading import grade, require_graders
from shell_router.lab.evaluation.records import (
    EvaluationOptions,
    Item,
    Record,
    Reply,
    Setting,
    read_items,
)
from shell_router.lab.evaluation.report import Report, build_rows, describe_engines, print_tables
from shell_router.lab.tables import open_console

WARM_UP = Item(-1, "Ready?", "yes", "exact", {})


def choose_settings(names: Sequence[str], served: Sequence[Setting]) -> list[Setting]:
    """Return the settings `named`, each once, or all models and then all topologies.

    Raises UnknownModel.
    """
    by_name = {setting.name: setting for setting in served}
    for name in names:
        if name not in by_name:
            remedy = suggest(name, tuple(by_name))
            raise UnknownModel(f"The router serves no {name!r}.", remedy=remedy)
    every = [
        setting for kind in ("model", "topology") for setting in served if setting.kind == kind
    ]
    return [by_name[name] for name in dict.fromkeys(names)] or every


def choose_baseline(settings: Sequence[Setting], name: str | None) -> Setting:
    """Return the baseline: the setting that is named, the first topology, or the first."""
    for setting in settings:
        if setting.name == name or (name is None and setting.kind == "topology"):
            return setting
    if name is None:
        return settings[0]
    names = ", ".join(setting.name for setting in settings)
    raise ConfigError(
        f"the baseline {name!r} is not among the settings.", remedy=f"They are: {names}."
    )


Asked = tuple[tuple[Item, int], ...]
"""Questions that are asked at the same time, each with its seed."""


def plan_rounds(
    items: Sequence[Item],
    seeds: Sequence[int],
    settings: Sequence[Setting],
    *,
    concurrency: int = 1,
) -> Iterator[tuple[Asked, Sequence[Setting]]]:
    """Yield rounds of `concurrency` questions, in one setting after the other, seed after seed.

    Rounds are the rows of a Williams square, and in every other cycle reversed: each setting comes
    equally often right after each other one, which leaves its prompts in the caches. Two settings
    are never asked at the same time, so that neither slows the other.
    """
    begins = product(seeds, range(0, len(items), concurrency))
    for number, (seed, begin) in enumerate(begins):
        again, by = divmod(number, len(settings))
        steps = ((at + 1) // 2 * (-1) ** at for at in range(len(settings)))  # 0, -1, 1, -2, 2, …
        order = [settings[(by + step) % len(settings)] for step in steps]
        yield (
            tuple((item, seed) for item in items[begin : begin + concurrency]),
            order[:: -1 if again % 2 else 1],
        )


def request_seed(seed: int, question: int) -> int:
    """Return the seed of a request, below 2^31 and the same for all settings."""
    return zlib.crc32(f"{seed}/{question}/0".encode()) >> 1


async def ask_item(
    client: RouterClient, setting: Setting, item: Item, seed: int, options: EvaluationOptions
) -> Reply | ShellRouterError:
    """Return the reply, or the error's text."""
    try:
        return await client.ask(request_body(setting, item, seed, options))
    except ShellRouterError as error:
        return error


def build_record(
    setting: Setting, item: Item, seed: int, reply: Reply | ShellRouterError
) -> Record:
    """Return the record of `item` in `setting`, also of a failed or ungradable answer."""
    record = Record(item.index, seed, setting.name)
    if isinstance(reply, ShellRouterError):
        return replace(record, error=str(reply))
    try:
        right, stated = grade(item, reply.text)
    except Exception as error:  # a check of IFBench may lack its data; what was asked is paid for
        failed = f"not graded: {type(error).__name__}: {error}"
        return replace(record, latency_s=reply.latency_s, error=failed)
    return replace(
        record,
        right=right,
        stated=stated,
        latency_s=reply.latency_s,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        agents=reply.agents,
        exits=reply.exits,
    )


def request_body(setting: Setting, item: Item, seed: int, options: EvaluationOptions) -> NewValues:
    """Build the body of a request."""
    sampling: Values = {"temperature": options.temperature}
    if setting.kind != "topology":
        sampling = {"temperature": options.temperature or 0.0, "max_tokens": options.max_tokens}
    return {
        "model": setting.name,
        "messages": [{"role": "user", "content": item.question}],
        "seed": request_seed(seed, item.index),
        **({"metadata": dict(item.labels)} if item.labels else {}),
        **{name: value for name, value in sampling.items() if value is not None},
    }


async def run_evaluation(options: EvaluationOptions) -> Report:
    """Ask, print the tables, write the files and return what they say.

    Where it ends early, cancelled or as the files cannot be written, the tables and the report are
    of what was asked so far. Raises ShellRouterError when nothing can be asked, and after the
    tables when more than half of the requests failed.
    """
    items = read_items(
        options.data, grader=options.grader, offset=options.offset, limit=options.limit
    )
    require_graders(items)
    console = open_console()
    async with connect_router(options, lambda step: console.print(f"  {step}", style="dim")) as (
        client,
        order,
    ):
        return await evaluate(client, order, items, options, console)


async def evaluate(
    client: RouterClient,
    order: Sequence[str],
    items: Sequence[Item],
    options: EvaluationOptions,
    console: Console,
) -> Report:
    """Evaluate `items` on a running router; models are listed in this `order`, others last."""
    served = sorted(
        await client.list_settings(),
        key=lambda setting: order.index(setting.name) if setting.name in order else len(order),
    )
    settings = choose_settings(options.settings, served)
    baseline = choose_baseline(settings, options.baseline).name
    total = len(items) * len(options.seeds) * len(settings)
    records: list[Record] = []
    try:
        await _ask_all(client, items, settings, options, records, console)
    finally:
        if records:
            names = tuple(setting.name for setting in settings)
            report = Report(
                data=f"{options.data.name}, {len(items)} questions",
                engine=describe_engines(settings, served),
                settings=names,
                baseline=baseline,
                seeds=options.seeds,
                concurrency=options.concurrency,
                sampling={"temperature": options.temperature, "max_tokens": options.max_tokens},
                asked=len(records),
                wanted=total,
                rows=build_rows(records, names, baseline),
            )
            print_tables(report, console)
            if options.json is not None:
                content = orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2) + b"\n"
                _write("--json", options.json, "wb", content)
    errors = [record.error for record in records if record.error]
    if len(errors) > len(records) / 2:
        raise ShellRouterError(
            f"{len(errors)} of {len(records)} requests failed, the first one with: {errors[0]}"
        )
    return report


def _write(option: str, file: Path, mode: str, content: bytes) -> None:
    try:
        with file.open(mode) as opened:
            opened.write(content)
    except OSError as error:
        raise ConfigError(
            f"{option} {file}: {error.strerror}.", remedy="Name a file that you may write."
        ) from error


async def _ask_all(
    client: RouterClient,
    items: Sequence[Item],
    settings: Sequence[Setting],
    options: EvaluationOptions,
    records: list[Record],
    console: Console,
) -> None:
    """Add to `records`, round by round; each round's are in the file before the next begins."""
    if options.records is not None:
        _write("--records", options.records, "wb", b"")
    for setting in settings:  # an engine's first batches pay for what is done only once
        await ask_item(client, setting, WARM_UP, 0, options)
    answers = len(items) * len(options.seeds) * len(settings)
    console.print(f"Asking {len(items)} questions in {len(settings)} settings: {answers} answers.")
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answers", total=answers)

        async def ask(setting: Setting, item: Item, seed: int) -> None:
            answered.append(
                (setting, item, seed, await ask_item(client, setting, item, seed, options))
            )
            progress.advance(task)

        for questions, order in plan_rounds(
            items, options.seeds, settings, concurrency=options.concurrency
        ):
            written = len(records)
            for setting in order:
                answered: list[tuple[Setting, Item, int, Reply | ShellRouterError]] = []
                try:
                    async with asyncio.TaskGroup() as tasks:
                        for item, seed in questions:
                            tasks.create_task(ask(setting, item, seed))
                finally:  # graded while nothing is asked, as that holds up the event loop
                    records += [build_record(*answer) for answer in answered]
            if options.records is not None:
                lines = b"".join(map(write_line, records[written:]))
                _write("--records", options.records, "ab", lines)
