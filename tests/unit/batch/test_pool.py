from pathlib import Path
from typing import Any

import pytest

from shell_router.batch.pool import Sampling, load_pool
from shell_router.config import Config, ModelSettings
from shell_router.errors import ConfigError
from shell_router.launching.plan import commands
from tests.fakes.pools import write_pool

SHIPPED = Path(__file__).parents[3] / "configs" / "pools" / "word-problems.yaml"
POOL = """
models:
  small: {path: models/small}
  large: {path: /models/large, system: Think twice., context_length: 4096}
workers:
  - embedded: {}
  - pair: {prefill: "http://127.0.0.1:1", decode: "http://127.0.0.1:2", launch: {prefill_gpus: [0], decode_gpus: [1]}}
aggregate: {model: large, tau: 0.67}
profile: costs.yaml
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pool.yaml"


def test_the_shipped_pool_is_a_right_one() -> None:
    pool = load_pool(SHIPPED)
    assert pool.proposer_names == ("small", "medium", "large")
    assert pool.aggregate is not None
    assert (pool.aggregate.tau, pool.aggregate.sampling.temperature) == (0.67, 0)


def test_paths_count_from_the_files_folder_and_what_is_not_said_has_a_default(file: Path) -> None:
    file.write_text(
        POOL + "embedder: {model: ./embedder}\nrecruit: {skills: runs/first}\n", encoding="utf-8"
    )
    pool = load_pool(file)
    assert pool.models["small"].path == file.parent / "models" / "small"
    assert pool.models["large"].path == Path("/models/large")
    assert pool.profile == file.parent / "costs.yaml"
    assert pool.recruit.skills == file.parent / "runs" / "first"
    assert pool.embedder.model == str(file.parent / "embedder")
    assert pool.proposer_names == ("small", "large")
    assert (pool.concurrency, pool.capacity, pool.recruit.proposers, pool.answers.kind) == (
        32,
        None,
        3,
        "auto",
    )
    assert pool.sampling == Sampling(0.7, 0.95, 512)
    assert pool.aggregate is not None
    assert pool.aggregate.sampling == Sampling(0.0, 0.95, 512)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("path: models/small", "system: x"), r":3: models\.small lacks 'path'"),
        (
            ("  - embedded: {}", "  - {}"),
            r":6: workers.0.: a worker is embedded or a pair, and not both\. Write `embedded: \{\}`",
        ),
        (
            (", launch: {prefill_gpus: [0], decode_gpus: [1]}", ""),
            r":7: workers.1.: a worker's pair is started .*`launch: \{\}`",
        ),
        (("model: large", "model: big"), r":2: aggregate names 'big', none of the models"),
        (
            ("tau: 0.67", "confidence: guess"),
            r":8: aggregate\.confidence must be 'plurality' or 'probability', not 'guess'",
        ),
        (
            ("profile:", "proposers: [tiny]\nprofile:"),
            "proposers names 'tiny', which is none of the models",
        ),
        (("profile:", "proposers: [small, small]\nprofile:"), "proposers names a model twice"),
        (("profile:", "profil:"), r":9: Unknown key 'profil'\. Did you mean 'profile'\?"),
    ],
)
def test_a_bad_setting_is_reported_by_name_and_line(
    file: Path, change: tuple[str, str], complaint: str
) -> None:
    changed = POOL.lstrip("\n").replace(*change)
    assert changed != POOL.lstrip("\n")
    file.write_text("# pool\n" + changed, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint) as refused:
        load_pool(file)
    assert str(refused.value).startswith(f"{file}:")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("models: {}\nworkers: [embedded: {}]", "models is empty"),
        ("models: {a: {path: a}}\nworkers: []", "workers is empty"),
    ],
)
def test_a_pool_of_nothing_is_refused(file: Path, content: str, complaint: str) -> None:
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        load_pool(file)


def test_another_tau_takes_the_place_of_the_pools(file: Path) -> None:
    file.write_text(POOL, encoding="utf-8")
    pool = load_pool(file)
    changed = pool.with_tau(2.0)
    assert changed.aggregate is not None
    assert changed.aggregate.tau == 2.0
    assert pool.with_tau(None) is pool
    file.write_text(POOL.replace("aggregate:", "# aggregate:"), encoding="utf-8")
    with pytest.raises(ConfigError, match="tau needs an aggregator, and the pool has none"):
        load_pool(file).with_tau(1.0)


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "ray://head.cluster:10001", "[::1]:6379"]
)
def test_a_pool_may_name_a_ray_cluster(tmp_path: Path, address: str) -> None:
    pool = load_pool(
        write_pool(
            tmp_path, ray={"address": address}, workers=[{"embedded": {}, "node": "10.0.0.2"}]
        )
    )
    assert pool.ray is not None
    assert pool.ray.address == address


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"ray": {"address": "head"}},
            "address must be auto, host:port or ray://host:port, not 'head'",
        ),
        ({"ray": {"address": "http://10.0.0.1:8265"}}, "address must be auto"),
        ({"ray": {"address": "auto", "cpus": -1}}, "ray.cpus must be a number at least 0, not -1"),
        ({"workers": [{"embedded": {}, "node": "10.0.0.2"}]}, "the pool runs on no Ray cluster"),
    ],
)
def test_a_wrong_cluster_is_refused_with_what_is_wrong(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_pool(write_pool(tmp_path, **changed))
    assert said in str(refused.value)


PAIR = (
    '{{pair: {{prefill: "http://127.0.0.1:{0}1", decode: "http://127.0.0.1:{0}2", launch: '
    "{{{1}}}}}}}"
)
TENSOR = """
models: {{large: {{path: large}}}}
workers: [{}]
aggregate: {{model: large, parallel: {}}}
"""


@pytest.mark.parametrize(
    ("launches", "options"),
    [
        (
            ("prefill_gpus: [0], decode_gpus: [1]", "prefill_gpus: [2, 3], decode_gpus: [1]"),
            {"prefill": ["--tp-size", "3"], "decode": []},
        ),
        (
            ("flags: --dtype float32", ""),
            {role: ["--dtype", "float32", "--tp-size", "2"] for role in ("prefill", "decode")},
        ),
        (
            ("prefill_gpus: [0]", "prefill_gpus: [1]"),
            {"prefill": ["--tp-size", "2"], "decode": ["--tp-size", "2"]},
        ),
    ],
)
def test_a_tensor_parallel_aggregator_spans_the_gpus_of_all_workers_at_the_place_of_the_first(
    file: Path, launches: tuple[str, str], options: dict[str, list[str]]
) -> None:
    places = ", ".join(PAIR.format(number + 1, launch) for number, launch in enumerate(launches))
    file.write_text(TENSOR.format(places, "tensor"))
    pool = load_pool(file)
    assert pool.spanning is not None and pool.spanning.pair is not None
    model = ModelSettings(Path("large"), pairs=(pool.spanning.pair,))
    for engine in commands(Config({"large": model}), python="python"):
        assert (
            engine.ready_url == f"http://127.0.0.1:1{1 if engine.role == 'prefill' else 2}/health"
        )
        assert [
            one for one in engine.argv if one in ("--tp-size", "--dtype", "float32", "2", "3")
        ] == options[engine.role]


def test_gpus_that_only_some_workers_name_span_nothing(file: Path) -> None:
    places = ", ".join((PAIR.format(1, "prefill_gpus: [0]"), PAIR.format(2, "")))
    file.write_text(TENSOR.format(places, "tensor"))
    with pytest.raises(
        ConfigError,
        match=r"only some workers name prefill_gpus\. Name prefill_gpus for every worker",
    ):
        load_pool(file)


def test_a_data_parallel_aggregator_has_no_worker_of_its_own(file: Path) -> None:
    file.write_text(TENSOR.format(PAIR.format(1, ""), "data"))
    assert load_pool(file).spanning is None


def test_a_tensor_parallel_aggregator_needs_sglang_pairs(file: Path) -> None:
    file.write_text(TENSOR.format("embedded: {}", "tensor"))
    with pytest.raises(
        ConfigError,
        match=r"not all workers are SGLang pairs on this machine\. Give the pool SGLang",
    ):
        load_pool(file)
