"""`shell-router demo`, `eval` and `calibrate`."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
import os
from pathlib import Path
from typing import Any

from shell_router import errors
from shell_router.cli.arguments import Commands, natural, numbers, positive, whole_numbers
from shell_router.cli.running import run

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def add_commands(commands: Commands) -> None:
    """What these commands take."""
    _add_demo(commands.add_parser("demo", help="start everything on this machine and ask a few questions"))
    _add_eval(commands.add_parser("eval", help="compare models, votes and topologies on questions of your own"))
    _add_calibrate(commands.add_parser("calibrate", help="choose an early exit's threshold by what accuracy it costs"))


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--rounds", type=positive, default=3, help="questions per topology (default 3)")
    demo.add_argument("--seed", type=int, default=0, help="fixes what agents and the early exit draw (default 0)")
    demo.add_argument("--json", action="store_true", help="no drawing; one JSON object on the last line")
    demo.set_defaults(command=_demo)


def _add_questions(command: argparse.ArgumentParser) -> None:
    """What is asked, and how."""
    command.add_argument("--data", type=Path, required=True, help='JSONL, one {"question": …, "answer": …} per line')
    command.add_argument("--grader", default="auto", choices=("auto", "exact", "numeric", "choice"))
    command.add_argument("--offset", type=natural, default=0, help="leave out so many questions (default 0)")
    command.add_argument("--limit", type=positive, help="ask at most so many questions")
    command.add_argument(
        "--seeds", type=whole_numbers, default=(0,), help="every question once per seed: 0,1,2 (default 0)"
    )
    command.add_argument("--concurrency", type=positive, default=1, help="questions at once (default 1)")
    command.add_argument("--timeout-s", type=float, default=900.0, help="limit for one request (default 900)")


def _add_reports(command: argparse.ArgumentParser) -> None:
    """What is written beside the tables."""
    command.add_argument("--by", metavar="KEY", help="accuracy per value of this key of the data, too")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")
    command.add_argument("--records", type=Path, metavar="FILE", help="write every answer, as JSONL")
    command.add_argument("--picture", type=Path, metavar="FILE", help="draw accuracy against latency, as SVG")


def _add_eval(evaluate: argparse.ArgumentParser) -> None:
    where = evaluate.add_mutually_exclusive_group(required=True)
    where.add_argument("--config", type=Path, help="start this deployment on a free port, and ask it")
    where.add_argument("--url", help="ask the router that runs there")
    evaluate.add_argument("--api-key-env", metavar="NAME", help="the environment variable that holds that router's key")
    _add_questions(evaluate)
    evaluate.add_argument("--temperature", type=float, help="for plain models (default 0) and for topologies' roots")
    evaluate.add_argument("--vote-temperature", type=float, default=0.7, help="for the members of a vote (default 0.7)")
    evaluate.add_argument("--max-tokens", type=positive, help="for plain models and votes (default: the engine's)")
    evaluate.add_argument("--baseline", metavar="SETTING", help="compare with this (default: the first topology)")
    _add_reports(evaluate)
    evaluate.add_argument(
        "settings", nargs="*", metavar="SETTING", help="model, topology, or vote:a*3,b (default: all)"
    )
    evaluate.set_defaults(command=_eval)


def _add_calibrate(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument("topology", type=Path, metavar="TOPOLOGY", help="file whose early exit has a threshold")
    calibrate.add_argument("--config", type=Path, required=True, help="the deployment that serves its models")
    _add_questions(calibrate)
    calibrate.add_argument("--bound", type=float, default=0.5, help="points of accuracy that may be lost (default 0.5)")
    calibrate.add_argument(
        "--thresholds", type=numbers, default=THRESHOLDS, help=f"to try (default {','.join(map(str, THRESHOLDS))})"
    )
    _add_reports(calibrate)
    calibrate.set_defaults(command=_calibrate)


def _demo(chosen: argparse.Namespace) -> int:
    from shell_router.demo import DemoSettings, run_demo

    settings = DemoSettings(chosen.rounds, chosen.seed, as_json=chosen.json)
    return run(run_demo(settings))


def _eval(chosen: argparse.Namespace) -> int:
    from shell_router.evaluation import EvaluationOptions, run_evaluation
    from shell_router.evaluation.options import Sampling

    if chosen.config and chosen.api_key_env:
        raise errors.ConfigError("--api-key-env goes with --url only.", remedy="A deployment of --config needs no key.")
    options = EvaluationOptions(
        config=chosen.config,
        url=chosen.url,
        api_key=_key(chosen.api_key_env),
        settings=tuple(chosen.settings),
        baseline=chosen.baseline,
        sampling=Sampling(chosen.temperature, chosen.vote_temperature, max_tokens=chosen.max_tokens),
        **_asked(chosen),
    )
    return run(run_evaluation(options))


def _calibrate(chosen: argparse.Namespace) -> int:
    from shell_router.evaluation import EvaluationOptions, run_calibration

    options = EvaluationOptions(config=chosen.config, **_asked(chosen))
    return run(run_calibration(chosen.topology, chosen.thresholds, chosen.bound, options))


def _asked(chosen: argparse.Namespace) -> dict[str, Any]:
    """The options of both commands."""
    from shell_router.evaluation.options import Reports

    return {
        "data": chosen.data,
        "grader": chosen.grader,
        "offset": chosen.offset,
        "limit": chosen.limit,
        "seeds": chosen.seeds,
        "concurrency": chosen.concurrency,
        "limit_s": chosen.timeout_s,
        "reports": Reports(chosen.json, chosen.records, chosen.picture, chosen.by),
    }


def _key(variable: str | None) -> str | None:
    """The secret in an environment variable. Raises ConfigError."""
    if variable is None:
        return None
    if secret := os.environ.get(variable):
        return secret
    raise errors.ConfigError(f"--api-key-env: the environment variable {variable} is empty.", remedy="Set it.")
