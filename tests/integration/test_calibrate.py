"""`shell-router calibrate` starts the deployment with a topology per early exit and names the one
to take.
"""

import asyncio
import re
from collections import Counter
from pathlib import Path

import orjson
import pytest

from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.scripted.server import ScriptedPair
from shell_router.core.engine import Generation
from shell_router.errors import ShellRouterError
from shell_router.lab.evaluation.calibration import (
    Tried,
    choose_exit,
    run_calibration,
    write_variants,
)
from shell_router.lab.evaluation.records import EvaluationOptions
from shell_router.topology import load_topology
from tests.fakes.api_server import api
from tests.fakes.evaluations import adding_moa, write_sums
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script


def thresholds(*each: float) -> Tried:
    """Of an exit in flight."""
    return Tried(each)


SHORT = "defaults: {sampling: {max_new_tokens: 128}}\n"
TREE = f"name: mine\ntree: {{shape: [3, 1], models: [a]}}\n{SHORT}"


def written(folder: Path, pair: ScriptedPair, gate: str) -> tuple[Path, Path]:
    """A topology file, and a deployment that serves another one."""
    model, topology, other, config = (
        folder / name for name in ("model", "mine.yaml", "other.yaml", "router.yaml")
    )
    topology.write_text(f"{TREE}early_exit: {gate}\n", encoding="utf-8")
    other.write_text(
        f"name: other\ntree: {{shape: [2, 1], models: [a]}}\n{SHORT}", encoding="utf-8"
    )
    pairs = f"[{{prefill: '{pair.prefill.url}', decode: '{pair.decode.url}'}}]"
    config.write_text(
        f"models: {{a: {{path: '{make_checkpoint(model)}', pairs: {pairs}}}}}\n"
        "topologies: [other.yaml]\nembedder: {model: none}\n",
        encoding="utf-8",
    )
    return topology, config


async def test_every_early_exit_is_asked_and_one_that_loses_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    async with ScriptedPair() as pair:
        topology, config = written(tmp_path, pair, "{policy: in_flight}")
        options = EvaluationOptions(write_sums(tmp_path, 4, 5, 6), config=config, json=report)
        choice = await run_calibration(topology, thresholds(0.5, 0.8), 0.5, options)
    settings = orjson.loads(report.read_bytes())["settings"]
    assert settings == [
        "mine-without-exit",
        "mine-in_flight-cluster-0.5",
        "mine-in_flight-cluster-0.8",
    ]
    assert choice.loss.value == 0.0
    assert (
        "early_exit: {policy: in_flight, scope: cluster, threshold: 0." in capsys.readouterr().out
    )


RASH = """
name: rash
tree: {shape: [3, 1], models: [small, medium, medium], root_model: large}
early_exit: {policy: in_flight, min_completed: 1}
"""
"""Its first agent, of `small`, may end the cluster alone."""


def moa_with_an_early_agent_that_is_wrong() -> ScriptedMoa:
    """`small` ends first and is wrong, `medium` is right, and `large` says what most of its
    precursors do.
    """
    moa = adding_moa({"small": 0, "medium": 100})
    large, tokenizer = moa.engines["large"], moa.tokenizers["large"]

    def most_said(request: Generation) -> Script:
        counts = Counter(re.findall(r"Answer: (\d+)", tokenizer.decode(request.input_ids)))
        return Script(f"They say so. Answer: {max(counts, key=counts.__getitem__, default='0')}")

    async def after_small(rid: str, _piece: int) -> None:
        while any(one.startswith(rid.rpartition(".")[0]) for one in moa.engines["small"].running):  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(100):  # turns in which the executor can take small's end in
            await asyncio.sleep(0)

    large.answer = most_said
    moa.engines["medium"].pace = after_small
    return moa


async def test_a_threshold_that_loses_answers_is_distinguished_from_one_that_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder, report = (tmp_path / name for name in ("rash.yaml", "variants", "report.json"))
    file.write_text(RASH, encoding="utf-8")
    folder.mkdir()
    variants = write_variants(file, thresholds(0.2, 0.9), folder)
    served_ones = tuple(load_topology(folder / f"{name}.yaml") for name in variants)
    async with api(moa_with_an_early_agent_that_is_wrong(), topologies=served_ones) as served:
        data = write_sums(tmp_path, 4, 5, 6, 7)
        options = EvaluationOptions(data, url=served.url, json=report)
        choice = await choose_exit(variants, 0.5, options)
        rash = {name: of for name, of in variants.items() if not name.endswith("0.9")}
        with pytest.raises(
            ShellRouterError, match=r"No early exit keeps the loss within 0\.5 points on these 4"
        ):
            await choose_exit(rash, 0.5, EvaluationOptions(data, url=served.url))
    rows = {row["setting"]: row for row in orjson.loads(report.read_bytes())["rows"]}
    assert {name: row["accuracy"]["value"] for name, row in rows.items()} == {
        "rash-without-exit": 1.0,
        "rash-in_flight-cluster-0.2": 0.0,
        "rash-in_flight-cluster-0.9": 1.0,
    }
    assert rows["rash-in_flight-cluster-0.2"]["exits"]["clusters_exited"] == 1.0
    assert (choice.settings["threshold"], choice.loss.value) == (0.9, 0.0)
    assert "loses 0.00 points" in capsys.readouterr().out


async def test_clusters_that_disagree_to_the_end_count_among_those_judged(tmp_path: Path) -> None:
    file, folder, report = (tmp_path / name for name in ("rash.yaml", "variants", "report.json"))
    file.write_text(RASH.replace("min_completed: 1", "min_completed: 3"), encoding="utf-8")
    folder.mkdir()
    variants = write_variants(file, thresholds(0.5), folder)
    served_ones = tuple(load_topology(folder / f"{name}.yaml") for name in variants)
    async with api(moa_with_an_early_agent_that_is_wrong(), topologies=served_ones) as served:
        options = EvaluationOptions(write_sums(tmp_path, 4, 5), url=served.url, json=report)
        await choose_exit(variants, 0.5, options)
    exits = orjson.loads(report.read_bytes())["rows"][1]["exits"]
    assert (exits["clusters_judged"], exits["clusters_exited"]) == (2, 0.0)
