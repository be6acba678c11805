"""`shell-router eval` over HTTP: models that can add up to a limit, asked for sums."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.scripted.server import ScriptedPair
from shell_router.api import ApiSettings
from shell_router.cli import main
from shell_router.core.engine import Generation
from shell_router.errors import (
    ConfigError,
    EngineError,
    EngineRejected,
    ShellRouterError,
    Unauthorized,
    UnknownModel,
)
from shell_router.lab.evaluation.records import EvaluationOptions
from shell_router.lab.evaluation.run import request_seed, run_evaluation
from shell_router.topology import parse_topology
from tests.fakes.api_server import Api, api, until
from tests.fakes.command import running_command, survivors
from tests.fakes.evaluations import adding_moa, asked_sum, write_sums
from tests.fakes.moa import ScriptedMoa, agent_of
from tests.fakes.scripted_engine import Script
from tests.fakes.topologies import parse_steps

LIMITS = {"small": 5, "medium": 5, "large": 15}
FIRST = parse_steps(
    """
name: first
start: [{when: {label: {effort: high}}, go: careful}, {go: quick}]
steps:
  quick: {model: small, then: [{when: {matches: "Answer: 0"}, go: careful}]}
  careful: {model: large}
""",
    source="first.yaml",
)
JUDGED = parse_topology(
    """
name: judged
tree: {shape: [3, 1], models: [small], root_model: large}
early_exit: {policy: threshold, threshold: 0, min_completed: 2}
""",
    source="judged.yaml",
)


async def _evaluated(
    served: Api, data: Path, *settings: str, **fields: Any
) -> dict[str, dict[str, Any]]:
    """The rows of the report's file, by setting."""
    report = data.with_name("report.json")
    await run_evaluation(
        EvaluationOptions(data, url=served.url, settings=settings, json=report, **fields)
    )
    return {row["setting"]: row for row in orjson.loads(report.read_bytes())["rows"]}


def _asked(moa: ScriptedMoa, alias: str) -> list[Generation]:
    """What a model was asked, without the warm-up."""
    return [
        one for one in moa.engines[alias].generated if asked_sum(moa.tokenizers[alias], one) > 0
    ]


async def test_right_answers_are_counted_for_models_and_topologies(tmp_path: Path) -> None:
    async with api(adding_moa(LIMITS)) as served:
        rows = await _evaluated(served, write_sums(tmp_path, 4, 5, 10, 20), "small", "duo", "large")
    rights = {name: row["accuracy"]["value"] for name, row in rows.items()}
    assert rights == {"small": 0.5, "duo": 0.75, "large": 0.75}
    assert rows["small"]["difference"]["value"] == -0.25
    assert rows["duo"]["difference"] is None
    assert rows["duo"]["latency_ratio"] == 1.0
    assert all(
        row["answers"] == 4 and row["failed"] == 0 and row["latency_p50_s"] > 0
        for row in rows.values()
    )


async def test_steps_are_compared_as_any_topology_and_questions_may_bring_labels(
    tmp_path: Path,
) -> None:
    data = tmp_path / "sums.jsonl"
    lines = [
        {"question": "What is 3 + 1?", "answer": "4"},
        {"question": "What is 9 + 1?", "answer": "10"},
        {"question": "What is 8 + 1?", "answer": "9", "metadata": {"effort": "high"}},
    ]
    data.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    async with api(adding_moa(LIMITS), topologies=(FIRST,)) as served:  # type: ignore[arg-type] # a topology with steps
        rows = await _evaluated(served, data, "first", "small", "large")
    first = rows["first"]
    assert [rows[name]["accuracy"]["value"] for name in ("first", "large")] == [1.0, 1.0]
    assert rows["small"]["accuracy"]["value"] == pytest.approx(1 / 3)
    assert {model: use["completed"] for model, use in first["models"].items()} == pytest.approx(
        {"small": 2 / 3, "large": 2 / 3}
    )


async def test_the_tables_say_what_was_evaluated_and_on_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with api(adding_moa(LIMITS)) as served:
        await run_evaluation(EvaluationOptions(write_sums(tmp_path, 4, 7), url=served.url))
    printed = capsys.readouterr().out
    assert "Evaluation of sums.jsonl, 2 questions" in printed
    assert "scripted engine" in printed
    for name in ("small", "medium", "large", "other", "duo"):
        assert f"│ {name} " in printed


async def test_agents_tokens_and_models_of_a_topology_come_from_its_traces(tmp_path: Path) -> None:
    async with api(adding_moa(LIMITS)) as served:
        rows = await _evaluated(served, write_sums(tmp_path, 4, 5), "duo")
    once = {"agents": 1, "started": 1.0, "completed": 1.0, "activation_rate": 1.0}
    assert rows["duo"]["models"] == {"small": once, "medium": once, "large": once}
    assert rows["duo"]["completion_tokens"] == 3 * 8


async def test_a_cut_agent_and_its_exit_are_counted(tmp_path: Path) -> None:
    moa = adding_moa(LIMITS)
    never = asyncio.Event()

    async def last_one_waits(rid: str, piece: int) -> None:
        if rid.endswith("proposer-3") and piece > 0:
            await never.wait()

    moa.engines["small"].pace = last_one_waits
    async with api(moa, topologies=(JUDGED,)) as served:
        rows = await _evaluated(served, write_sums(tmp_path, 4, 5), "judged")
    row = rows["judged"]
    assert row["models"]["small"] == {
        "agents": 3,
        "started": 3.0,
        "completed": 2.0,
        "activation_rate": 2 / 3,
    }
    assert (
        row["agents_cut"],
        row["exits"]["clusters_judged"],
        row["exits"]["clusters_exited"],
    ) == (1.0, 2, 1.0)
    assert row["exits"]["questions_with_exit"] == 1.0
    assert 0 < row["exits"]["exposed_s"] < row["latency_p95_s"]


async def test_what_is_said_of_sampling_is_sent_with_the_same_seed_in_all_settings(
    tmp_path: Path,
) -> None:
    moa = adding_moa(LIMITS)
    async with api(moa) as served:
        await _evaluated(
            served,
            write_sums(tmp_path, 4),
            "small",
            "duo",
            temperature=0.3,
            max_tokens=77,
            seeds=(3,),
        )
    asked = {agent_of(one): one.sampling for alias in LIMITS for one in _asked(moa, alias)}
    assert (asked["small"]["temperature"], asked["small"]["max_new_tokens"]) == (0.3, 77)
    assert asked["root"]["temperature"] == 0.3 and asked["root"]["max_new_tokens"] > 77
    assert {asked[name]["sampling_seed"] for name in ("small", "root")} == {request_seed(3, 0)}


async def test_plain_models_are_greedy_and_topologies_sample_as_they_say(tmp_path: Path) -> None:
    moa = adding_moa(LIMITS)
    async with api(moa) as served:
        await _evaluated(served, write_sums(tmp_path, 4), "small", "duo")
    asked = {agent_of(one): one.sampling for alias in LIMITS for one in _asked(moa, alias)}
    assert asked["small"]["temperature"] == 0.0
    assert "temperature" not in asked["root"]


async def test_settings_take_turns_on_each_question(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    async with api(adding_moa(LIMITS)) as served:
        data = write_sums(tmp_path, 4, 10)
        options = EvaluationOptions(
            data, url=served.url, settings=("small", "large"), records=records
        )
        await run_evaluation(options)
    written = [orjson.loads(line) for line in records.read_bytes().splitlines()]
    assert [(one["question"], one["setting"], one["right"], one["stated"]) for one in written] == [
        (0, "small", True, "4"),
        (0, "large", True, "4"),
        (1, "large", True, "10"),
        (1, "small", False, "0"),
    ]


async def test_questions_asked_at_once_are_asked_in_the_same_setting(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    async with api(adding_moa(LIMITS)) as served:
        options = EvaluationOptions(
            write_sums(tmp_path, 4, 5, 6, 7),
            url=served.url,
            settings=("small", "large"),
            concurrency=2,
            records=records,
        )
        await run_evaluation(options)
    written = [orjson.loads(line) for line in records.read_bytes().splitlines()]
    assert [one["setting"] for one in written] == ["small"] * 2 + ["large"] * 4 + ["small"] * 2
    assert [{one["question"] for one in written[at : at + 2]} for at in (0, 2, 4, 6)] == [
        {0, 1},
        {0, 1},
        {2, 3},
        {2, 3},
    ]


async def test_several_questions_are_asked_at_once_and_no_more(tmp_path: Path) -> None:
    moa, running, most = adding_moa(LIMITS), 0, 0
    gate = asyncio.Barrier(3)

    async def together(_rid: str, piece: int) -> None:
        nonlocal running, most
        if piece == 0 and moa.engines["small"].generated[-1] in _asked(moa, "small"):
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1

    moa.engines["small"].pace = together
    async with api(moa) as served, asyncio.timeout(20):
        rows = await _evaluated(served, write_sums(tmp_path, *range(1, 7)), "small", concurrency=3)
    assert (rows["small"]["answers"], most) == (6, 3)


async def test_a_failed_request_is_wrong_and_counted(tmp_path: Path) -> None:
    moa = adding_moa(LIMITS)
    _break(moa, "large", {5})
    async with api(moa) as served:
        rows = await _evaluated(served, write_sums(tmp_path, 4, 5), "small", "large", "duo")
    assert {name: row["failed"] for name, row in rows.items()} == {"small": 0, "large": 1, "duo": 1}
    assert {name: row["accuracy"]["value"] for name, row in rows.items()} == {
        "small": 1.0,
        "large": 0.5,
        "duo": 0.5,
    }


async def test_more_failures_than_answers_end_in_an_error_with_the_first_after_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moa = adding_moa(LIMITS)
    _break(moa, "large", {4, 5})
    async with api(moa) as served:
        with pytest.raises(
            ShellRouterError,
            match=r"2 of 3 requests failed, the first one with: .*400.*4 is too much",
        ):
            await _evaluated(served, write_sums(tmp_path, 4, 5, 6), "large")
    assert "│ large " in capsys.readouterr().out


def _break(moa: ScriptedMoa, alias: str, sums: set[int]) -> None:
    """Let a model fail on these sums."""
    engine, tokenizer = moa.engines[alias], moa.tokenizers[alias]
    working = engine.answer

    def answer(request: Generation) -> Script:
        wanted = asked_sum(tokenizer, request)
        refusal = EngineRejected(f"{wanted} is too much", status=400)
        return Script("no", error=refusal) if wanted in sums else working(request)

    engine.answer = answer


async def test_an_unknown_setting_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    moa = adding_moa(LIMITS)
    async with api(moa) as served:
        with pytest.raises(UnknownModel, match=r"no 'dou'. Did you mean 'duo'\?"):
            await _evaluated(served, write_sums(tmp_path, 4), "dou")
    assert not any(engine.generated for engine in moa.engines.values())


async def test_a_router_with_keys_is_asked_with_one(tmp_path: Path) -> None:
    async with api(adding_moa(LIMITS), ApiSettings(keys={"me": "sk-1"})) as served:
        rows = await _evaluated(served, write_sums(tmp_path, 4), "duo", api_key="sk-1")
        assert rows["duo"]["accuracy"]["value"] == 1.0
        with pytest.raises(Unauthorized, match="--api-key-env"):
            await _evaluated(served, write_sums(tmp_path, 4), "duo")


async def test_a_deployments_engines_are_named_and_its_keys_not_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config, report = (
        make_checkpoint(tmp_path / "model", seed=1),
        tmp_path / "router.yaml",
        tmp_path / "report.json",
    )
    async with ScriptedPair() as pair:
        pairs = f"[{{prefill: '{pair.prefill.url}', decode: '{pair.decode.url}'}}]"
        keys = "api_keys: {me: {env: SHELL_ROUTER_KEY_THAT_IS_NOT_SET}, you: secret}\n"
        config.write_text(
            f"{keys}embedder: {{model: none}}\nmodels: {{b: {{path: '{model}', pairs: &p "
            f"{pairs}}}, "
            f"a: {{path: '{model}', pairs: *p}}}}\n"
        )
        options = EvaluationOptions(write_sums(tmp_path, 4), config=config, json=report)
        await run_evaluation(options)
    written = orjson.loads(report.read_bytes())
    assert written["engine"] == "scripted engine"
    assert written["settings"] == ["b", "a"], "in the file's order"
    assert [row["failed"] for row in written["rows"]] == [0, 0]
    assert "model b is ready" in capsys.readouterr().out


SMALL = Path(__file__).parents[2] / "models" / "small"
EMBEDDED = """
listen: {{host: 0.0.0.0}}
api_keys: {{me: secret}}
models: {{small: {{path: {model}}}}}
embedder: {{model: hash}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_deployment_that_was_started_ends_with_the_evaluation(
    tmp_path: Path, interrupted: bool
) -> None:
    config = tmp_path / "router.yaml"
    config.write_text(EMBEDDED.format(model=SMALL), encoding="utf-8")
    asked = write_sums(tmp_path, *range(1, 2000 if interrupted else 4))
    async with running_command("eval", "--config", config, "--data", asked) as command:
        await command.line_with("Asking", limit_s=120)
        started = command.started()
        assert len(started) >= 2, "a prefill and a decode process"
        if interrupted:
            command.signal(signal.SIGINT)
        code, output = await command.ended(limit_s=120)
        assert (code, survivors(started)) == (130 if interrupted else 0, set()), output
    assert interrupted or "embedded pair, cpu" in output


@pytest.fixture
def held_after_two(tmp_path: Path) -> Iterator[tuple[ScriptedMoa, Path]]:
    """Models of which `large` never answers the third question."""
    moa, never = adding_moa(LIMITS), asyncio.Event()

    async def stuck(_rid: str, _piece: int) -> None:
        if len(_asked(moa, "large")) > 2:
            await never.wait()

    moa.engines["large"].pace = stuck
    yield moa, write_sums(tmp_path, 4, 5, 6, 7)


async def test_an_interrupted_evaluation_prints_what_it_has_and_leaves_nothing(
    held_after_two: tuple[ScriptedMoa, Path],
) -> None:
    moa, data = held_after_two
    report = data.with_name("report.json")
    async with api(moa) as served:
        arguments = ("--url", served.url, "--data", data, "--json", report, "large")
        async with running_command("eval", *arguments) as command:
            await command.line_with("Asking 4 questions", limit_s=60)
            await until(lambda: len(_asked(moa, "large")) > 2 and bool(moa.running))
            command.signal(signal.SIGINT)
            code, output = await command.ended(limit_s=60)
        await until(lambda: not moa.running)
    assert code == 130, output
    assert "PARTIAL: interrupted after 2 of 4 answers" in output
    assert "Traceback" not in output
    written = orjson.loads(report.read_bytes())
    assert (written["partial"], written["asked"], written["rows"][0]["answers"]) == (True, 2, 2)


async def test_the_command_writes_its_files_and_ends_with_0_or_with_2_where_most_fails(
    tmp_path: Path,
) -> None:
    data, records = write_sums(tmp_path, 4, 5, 10), tmp_path / "records.jsonl"
    moa = adding_moa(LIMITS)
    _break(moa, "medium", {4, 5})
    async with api(moa) as served:
        async with running_command(
            "eval", "--url", served.url, "--data", data, "--records", records, "small"
        ) as command:
            code, output = await command.ended(limit_s=60)
        assert (code, "Traceback" in output) == (0, False), output
        assert "66.7%" in output
        assert len(records.read_bytes().splitlines()) == 3
        async with running_command(
            "eval", "--url", served.url, "--data", data, "medium"
        ) as command:
            code, output = await command.ended(limit_s=60)
        assert code == 2
        assert "shell-router: 2 of 3 requests failed, the first one with:" in output


@pytest.mark.parametrize("option", ["--json", "--records"])
def test_a_file_that_cannot_be_written_is_reported_before_anything_is_asked(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path / "no" / "x", tmp_path):
        assert (
            main(["eval", "--url", "http://127.0.0.1:1", "--data", "mine.jsonl", option, str(file)])
            == 2
        )
        assert f"{file} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["json", "records"])
async def test_a_file_that_takes_nothing_is_reported_after_the_tables(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {option: Path("/dev/full")}  # opens well
    async with api(adding_moa(LIMITS)) as served:
        options = EvaluationOptions(
            write_sums(tmp_path, 4, 5), url=served.url, settings=("small",), **files
        )
        with pytest.raises(ConfigError, match=f"--{option} /dev/full: No space left"):
            await run_evaluation(options)
    assert "│ small " in capsys.readouterr().out


async def test_what_data_say_is_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "[bold].jsonl"
    data.write_bytes(orjson.dumps({"question": "[/x] What is 3 + 1?", "answer": "4"}))
    async with api(adding_moa(LIMITS)) as served:
        await run_evaluation(EvaluationOptions(data, url=served.url, settings=("small",)))
    printed = capsys.readouterr().out
    assert "Evaluation of [bold].jsonl" in printed


async def test_pairs_that_launch_starts_are_expected_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config = make_checkpoint(tmp_path / "model"), tmp_path / "router.yaml"
    pair = "{prefill: 'http://127.0.0.1:1', decode: 'http://127.0.0.1:2', launch: {}}"
    config.write_text(
        f"models: {{a: {{path: '{model}', pairs: [{pair}]}}}}\n"
        "embedder: {model: none}\nlimits: {engine_start_s: 0.2}\n",
        encoding="utf-8",
    )
    with pytest.raises(
        EngineError,
        match=r"not ready within 0\.2 s.*have to run already: `shell-router launch --config",
    ):
        await run_evaluation(EvaluationOptions(write_sums(tmp_path, 4), config=config))
    assert "have to run already" in capsys.readouterr().out


def test_a_key_is_refused_for_a_deployment_that_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "eval",
        "--config",
        "router.yaml",
        "--data",
        "mine.jsonl",
        "--api-key-env",
        "MY_KEY",
    ]
    assert main(arguments) == 2
    assert "--api-key-env goes with --url only" in capsys.readouterr().err


async def test_a_router_that_is_not_there_is_reported_in_one_line(tmp_path: Path) -> None:
    arguments = ("--url", "http://127.0.0.1:1", "--data", write_sums(tmp_path, 4))
    async with running_command("eval", *arguments) as command:
        code, output = await command.ended(limit_s=60)
    assert (code, output.count("\n")) == (2, 1), output
    assert "No answer from a router at http://127.0.0.1:1" in output
