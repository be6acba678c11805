"""The commands that a deployment's YAML file becomes."""

import shlex
from pathlib import Path

import pytest

from launch.sglang_cpu.pair import COMMON_OPTIONS, ROLE_OPTIONS
from shell_router.app import load_config
from shell_router.config import Config
from shell_router.errors import ConfigError
from shell_router.launching.plan import TRANSFER_VARIABLES, EngineCommand, LaunchPlan, plan

CONFIGS = Path(__file__).parents[3] / "configs"
FOLDER = Path("/run/engines")
MODEL = "models:\n  m:\n    path: /models/m\n    pairs:\n      - "
PAIR = (
    "{prefill: 'http://127.0.0.1:1', decode: 'http://127.0.0.1:2', bootstrap_port: 3, launch: "
    "{%s}}\n"
)


def read(folder: Path, text: str) -> Config:
    file = folder / "launch.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, {})


def planned(folder: Path, text: str, machine: str | None = None) -> LaunchPlan:
    return plan(read(folder, text), folder=FOLDER, python="/usr/bin/python", machine=machine)


def shipped(name: str, machine: str | None = None) -> LaunchPlan:
    config = load_config(CONFIGS / name, {"SHELL_ROUTER_KEY": "k"})
    return plan(config, folder=FOLDER, python="/usr/bin/python", machine=machine)


def options(engine: EngineCommand) -> dict[str, str]:
    """Flags with values, by name; a later one wins, as in SGLang."""
    return {
        name: value
        for name, value in zip(engine.argv, engine.argv[1:], strict=False)
        if name.startswith("--")
    }


def test_a_pair_becomes_a_prefill_and_a_decode_that_find_each_other(tmp_path: Path) -> None:
    prefill, decode = planned(tmp_path, MODEL + PAIR % "").engines
    assert (prefill.name, decode.name) == ("m/prefill", "m/decode")
    assert prefill.argv[:3] == ("/usr/bin/python", "-m", "sglang.launch_server")
    for engine, port in ((prefill, "1"), (decode, "2")):
        given = options(engine)
        assert given["--model-path"] == "/models/m"
        assert given["--port"] == port
        assert given["--disaggregation-mode"] == engine.role
        assert given["--disaggregation-bootstrap-port"] == "3"
        assert given["--disaggregation-transfer-backend"] == "mooncake"
        assert engine.ready_url == f"http://127.0.0.1:{port}/health"


def test_an_undivided_server_becomes_one_engine(tmp_path: Path) -> None:
    launch = "{gpus: [2, 3], flags: --mem-fraction-static 0.8}"
    server = f"{{server: 'http://127.0.0.1:1', launch: {launch}}}\n"
    text = (
        MODEL.replace("pairs", "servers")
        + server
        + "launch: {drafts: true, prefill_flags: --no, flags: --device cuda}\n"
    )
    (engine,) = planned(tmp_path, text).engines
    assert (engine.name, engine.ports) == ("m/server", (1,))
    assert engine.env == {"CUDA_VISIBLE_DEVICES": "2,3", "SHELL_ROUTER_DRAFTS": "1"}
    given = options(engine)
    assert (given["--tp-size"], given["--device"]) == ("2", "cuda")
    assert given["--mem-fraction-static"] == "0.8"
    assert given["--speculative-algorithm"] == "NGRAM"
    assert not any("disaggregation" in flag or flag == "--no" for flag in engine.argv)


def test_gpus_become_the_visible_devices_and_several_become_tensor_parallelism(
    tmp_path: Path,
) -> None:
    prefill, decode = planned(
        tmp_path, MODEL + PAIR % "prefill_gpus: [4, 5], decode_gpus: [6]"
    ).engines
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert options(prefill)["--tp-size"] == "2"
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "6"
    assert "--tp-size" not in decode.argv


def test_without_gpus_none_are_chosen(tmp_path: Path) -> None:
    assert all(
        "CUDA_VISIBLE_DEVICES" not in engine.env
        for engine in planned(tmp_path, MODEL + PAIR % "").engines
    )


def test_decode_beats_faster_and_prefill_waits_longer_for_transfers_over_tcp(
    tmp_path: Path,
) -> None:
    prefill, decode = planned(tmp_path, MODEL + PAIR % "").engines
    assert decode.env == {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"}
    assert prefill.env == TRANSFER_VARIABLES


def test_decode_drafts_where_the_deployment_says_so_and_the_pairs_own_flags_win(
    tmp_path: Path,
) -> None:
    text = MODEL + PAIR % "decode_flags: --max-running-requests 9" + "launch: {drafts: true}\n"
    prefill, decode = planned(tmp_path, text).engines
    assert decode.env["SHELL_ROUTER_DRAFTS"] == "1"
    assert options(decode)["--speculative-algorithm"] == "NGRAM"
    assert options(decode)["--max-running-requests"] == "9"
    assert "--speculative-algorithm" not in prefill.argv
    assert "SHELL_ROUTER_DRAFTS" not in prefill.env


def test_an_engine_of_several_gpus_places_experts_where_its_pair_says_so(tmp_path: Path) -> None:
    text = MODEL + PAIR % "expert_placement: swap, decode_gpus: [1, 2]"
    prefill, decode = planned(tmp_path, text).engines
    assert options(decode)["--ep-size"] == "2" and "--enable-eplb" in decode.argv
    assert options(decode)["--eplb-rebalance-num-iterations"] == "3000"
    assert decode.env["SHELL_ROUTER_EXPERT_PLACEMENT"] == "swap"
    assert (
        "--enable-eplb" not in prefill.argv and "SHELL_ROUTER_EXPERT_PLACEMENT" not in prefill.env
    )
    for wrong, named in (("best", "swap"), ("swap", "several GPUs")):
        with pytest.raises(ConfigError, match=named):
            planned(tmp_path, MODEL + PAIR % f"expert_placement: {wrong}")


def test_the_engines_of_a_model_without_drafts_are_not_started_to_draft(tmp_path: Path) -> None:
    text = (MODEL + PAIR % "").replace(
        "path:", "drafts: off\n    path:"
    ) + "launch: {drafts: true}\n"
    assert all(
        "--speculative-algorithm" not in engine.argv for engine in planned(tmp_path, text).engines
    )


def test_a_pairs_flags_follow_those_of_all_engines_and_a_roles_its_pairs(tmp_path: Path) -> None:
    text = (
        MODEL
        + PAIR % "flags: --x 2, decode_flags: --x 3"
        + "launch: {flags: --x 1, prefill_flags: '--y \"a b\"'}\n"
    )
    prefill, decode = planned(tmp_path, text).engines
    assert prefill.argv[-6:] == ("--x", "1", "--y", "a b", "--x", "2")
    assert decode.argv[-6:] == ("--x", "1", "--x", "2", "--x", "3")


def test_the_deployment_names_interpreter_backend_and_variables(tmp_path: Path) -> None:
    text = (
        MODEL
        + PAIR % ""
        + "launch: {python: /venv/python, transfer_backend: nixl, environment: {A: 'b c'}}\n"
    )
    prefill, decode = planned(tmp_path, text).engines
    assert prefill.argv[0] == "/venv/python"
    assert options(prefill)["--disaggregation-transfer-backend"] == "nixl"
    assert prefill.env == {"A": "b c"}
    assert decode.env["A"] == "b c"


def test_a_line_of_the_dry_run_is_what_a_shell_takes_apart_again(tmp_path: Path) -> None:
    text = MODEL + PAIR % "decode_flags: '--note \"it''s\"'" + "launch: {environment: {A: 'b c'}}\n"
    launched = planned(tmp_path, text)
    for engine in launched.engines:
        words = shlex.split(engine.shell)
        assert words[-len(engine.argv) :] == list(engine.argv)
        assert words[: -len(engine.argv)] == [
            f"{name}={value}" for name, value in engine.env.items()
        ]


def test_a_context_length_is_the_engines_too(tmp_path: Path) -> None:
    text = MODEL.replace("path:", "context_length: 4096\n    path:") + PAIR % ""
    assert all(
        options(engine)["--context-length"] == "4096" for engine in planned(tmp_path, text).engines
    )


def test_engines_are_started_with_their_models_adapters_by_name(tmp_path: Path) -> None:
    adapters = "    adapters: {algebra: lora/algebra, odd: /x=y}\n"
    for engine in planned(tmp_path, MODEL + PAIR % "" + adapters).engines:
        at = engine.argv.index("--lora-paths")
        assert engine.argv[at - 1] == "--enable-lora"
        named = (f"algebra={tmp_path / 'lora' / 'algebra'}", "odd=/x=y")
        assert engine.argv[at + 1 : at + 3] == named


def test_a_port_given_twice_is_refused_by_the_engines_names(tmp_path: Path) -> None:
    text = MODEL + (PAIR % "").replace("bootstrap_port: 3", "bootstrap_port: 2")
    with pytest.raises(
        ConfigError, match=r"port 2 of 127\.0\.0\.1 is given 2 times: m/prefill and m/decode"
    ):
        planned(tmp_path, text)


def test_a_deployment_with_nothing_to_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Add `launch: \{\}` to a pair"):
        planned(tmp_path, "models: {m: {path: m}}\n")


SHARED = """\
models:
  m:
    path: /models/m
    pairs:
      - {prefill: 'http://h:1', decode: 'http://h:2', bootstrap_port: 3, launch: {decode_gpus: [2]}}
      - {prefill: 'http://h:4', decode: 'http://h:2', bootstrap_port: 5, launch: {prefill_gpus: [1], decode_gpus: [%d]}}
"""


def test_an_engine_that_two_pairs_share_is_started_once(tmp_path: Path) -> None:
    engines = planned(tmp_path, SHARED % 2).engines
    assert [(engine.name, engine.ports) for engine in engines] == [
        ("m-1/prefill", (1, 3)),
        ("m-1/decode", (2,)),
        ("m-2/prefill", (4, 5)),
    ]


def test_an_engine_that_two_pairs_would_launch_differently_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"models.m.pairs\[1\] launches a decode engine .* other decode_gpus"
    ):
        planned(tmp_path, SHARED % 3)


def test_pairs_without_launch_are_left_to_others(tmp_path: Path) -> None:
    other = (
        "  n: {path: /n, pairs: [{prefill: 'http://127.0.0.1:8', decode: 'http://127.0.0.1:9'}]}\n"
    )
    assert [engine.name for engine in planned(tmp_path, MODEL + PAIR % "" + other).engines] == [
        "m/prefill",
        "m/decode",
    ]


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ("prefill_gpus: [-1]", "prefill_gpus[0] must be a whole number at least 0"),
        ("decode_gpus: [1, 1]", "names 1 twice"),
        ("flags: '--x \"'", "Close every quote"),
    ],
)
def test_a_wrong_launch_setting_is_refused_with_its_line(
    tmp_path: Path, launch: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=r"launch\.yaml:5: ") as refused:
        read(tmp_path, MODEL + PAIR % launch)
    assert words in str(refused.value)


def test_aliases_that_share_a_pair_share_its_engines() -> None:
    launched = shipped("sglang-cpu.yaml")
    assert [engine.name for engine in launched.engines] == ["small/prefill", "small/decode"]


def test_one_undivided_server_serves_the_three_names_of_the_shipped_topologies() -> None:
    (engine,) = shipped("sglang-one-server.yaml").engines
    assert engine.name == "small/server"


def test_the_cpu_deployment_has_the_flags_of_the_pair_under_test() -> None:
    for engine in shipped("sglang-cpu.yaml").engines:
        wanted = (*COMMON_OPTIONS, *ROLE_OPTIONS[engine.role])
        assert set(wanted) <= set(engine.argv)


def test_the_papers_six_gpus_are_each_taken_by_one_engine() -> None:
    engines = shipped("sglang-six-gpus.yaml").engines
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in engines] == [
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
    ]


def test_one_gpu_holds_all_engines_within_its_memory() -> None:
    engines = shipped("sglang-one-gpu.yaml").engines
    assert len(engines) == 6
    assert {engine.env["CUDA_VISIBLE_DEVICES"] for engine in engines} == {"0"}
    assert all("--max-total-tokens" in options(engine) for engine in engines), (
        "else the first takes all memory"
    )


def test_each_of_two_machines_starts_its_own_engines_and_waits_for_the_others() -> None:
    first, second = (shipped("sglang-two-machines.yaml", host) for host in ("10.0.0.1", "10.0.0.2"))
    assert {engine.role for engine in first.engines} == {"prefill"}
    assert {engine.role for engine in second.engines} == {"decode"}
    assert first.engines == second.elsewhere
    assert second.engines == first.elsewhere


@pytest.mark.parametrize("machine", [None, "10.9.9.9"])
def test_two_machines_are_asked_which_they_are(machine: str | None) -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1, 10\.0\.0\.2.*--machine 10\.0\.0\.1"):
        shipped("sglang-two-machines.yaml", machine)


def test_engines_of_models_that_sleep_can_and_are_not_made_to_generate_by_a_health_check(
    tmp_path: Path,
) -> None:
    def both(swapping: str) -> list[EngineCommand]:
        return list(planned(tmp_path, MODEL + PAIR % "" + swapping).engines)

    for engine in both("swapping: {max_loaded_models: 1}\n"):
        assert engine.sleeper == "m" and "--enable-memory-saver" in engine.argv
        assert engine.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    for engine in both(""):
        assert engine.sleeper is None and "--enable-memory-saver" not in engine.argv
        assert "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION" not in engine.env
