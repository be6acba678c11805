import re
from pathlib import Path

import pytest

from benchmarks.coserve.pool import Component, Costs, Policies
from benchmarks.coserve.pool.pool_file import read_component_pool, read_profiled_pool
from benchmarks.coserve.pool.splitting import CASUAL_SHARE
from shell_router.errors import ConfigError

pytestmark = pytest.mark.slow


BY_HAND = """folder: weights
architectures:
  classifier: {module: "shop.nets:classifier", components: ["type-*"], sample: [3, 8, 8]}
  detector: {module: "shop.nets:detector", components: ["detector-*"], sample: [3, 8, 8]}
executors:
  gpu-0: {device: "cuda:0", memory_bytes: 5000}
  gpu-1: {device: "cuda:0", memory_bytes: 5000}
rules:
  - {chain: [type-1, detector-1], share: 1}
profile: measured.yaml
"""
MEASURED = """costs:
  cuda:0:
    classifier: {sample_s: 0.1, batch_s: 0.2, largest_batch: 8, activation_bytes: 9, host_load_s: 0.1, disk_load_s: 0.2}
components:
  type-1: {architecture: classifier, memory_bytes: 100, usage: 0.5}
  detector-1: {architecture: detector, memory_bytes: 200, usage: 0.5, after: [type-1]}
component_shares:
  gpu-1: 0.6
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pool.yaml"


def written(file: Path, by_hand: str, measured: str = "") -> Path:
    file.write_text(by_hand, encoding="utf-8")
    if measured:
        file.with_name("measured.yaml").write_text(measured, encoding="utf-8")
    return file


def test_a_measured_file_gives_the_catalog_and_the_executors(file: Path) -> None:
    found = read_profiled_pool(written(file, BY_HAND, MEASURED))
    assert found.folder == file.parent / "weights"
    assert found.catalog() == [
        Component("type-1", "classifier", 100, 0.5),
        Component("detector-1", "detector", 200, 0.5, frozenset({"type-1"})),
    ]
    first, second = found.executor_settings()
    assert first.costs == second.costs == {"classifier": Costs(0.1, 0.2, 8, 9, 0.1, 0.2)}
    assert (first.component_share, second.component_share) == (CASUAL_SHARE, 0.6)


@pytest.mark.parametrize("missing", ["costs", "components"])
def test_a_file_that_was_not_measured_says_how(file: Path, missing: str) -> None:
    measured = f"\n{MEASURED}".partition(f"\n{missing}:")[0]
    assert read_component_pool(written(file, BY_HAND, measured)).architectures
    with pytest.raises(ConfigError, match=r"python -m benchmarks\.coserve\.pool"):
        read_profiled_pool(file)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            ("largest_batch: 8", "largest_batch: 0"),
            (
                r"measured\.yaml:3: costs\.cuda:0\.classifier\.largest_batch must be .* at least "
                r"1, "
                r"not 0"
            ),
        ),
        (("sample_s: 0.1, ", ""), r"measured\.yaml:3: costs\.cuda:0\.classifier lacks 'sample_s'"),
        (
            ("usage: 0.5, after", "usage: often, after"),
            r"measured\.yaml:6: components\.detector-1\.usage must be a number .*, not 'often'",
        ),
        (
            ("usage: 0.5, after", "usage: 5, after"),
            r"measured\.yaml:6: components\.detector-1\.usage must be .* at most 1, not 5",
        ),
        (
            ("memory_bytes: 200", "memory_bytes: 0"),
            r"measured\.yaml:6: components\.detector-1\.memory_bytes must be .* at least 1, not 0",
        ),
        (
            ("after: [type-1]", "after: [detector-1]"),
            r"measured\.yaml:6: 'detector-1' cannot come before itself",
        ),
        (("gpu-0: {", "host: {"), r"pool\.yaml:6: an executor is named 'host'"),
        (
            ("detector, memory", "dectector, memory"),
            r"measured\.yaml:6: there is no architecture 'dectector'",
        ),
        (
            ("after: [type-1]", "after: [type-7]"),
            r"measured\.yaml:6: there is no component 'type-7'",
        ),
        (("gpu-1: 0.6", "gpu-9: 0.6"), r"measured\.yaml:8: there is no executor 'gpu-9'"),
        (
            ("gpu-1: 0.6", "gpu-1: 1.6"),
            r"measured\.yaml:8: component_shares\.gpu-1 must be .* at most 1, not 1\.6",
        ),
        (("chain: [type-1, ", "chain: [type-0, "), r"pool\.yaml:9: there is no component 'type-0'"),
        (
            ("share: 1}", "share: 0}"),
            r"pool\.yaml:9: rules\[0\]\.share must be a number above 0, not 0",
        ),
        (
            ('"shop.nets:detector"', "shop.nets"),
            (
                r"pool\.yaml:4: architectures\.detector\.module must be a function .*, not "
                r"'shop\.nets'"
            ),
        ),
        (
            ("memory_bytes: 5000}", "memory: 5000}"),
            r"pool\.yaml:6: Unknown key 'memory' in executors\.gpu-0",
        ),
    ],
)
def test_what_is_wrong_is_reported_with_its_line(
    file: Path, wrong: tuple[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_component_pool(written(file, BY_HAND.replace(*wrong), MEASURED.replace(*wrong)))


def test_an_expert_is_of_the_only_architecture_whose_patterns_it_matches(file: Path) -> None:
    found = read_component_pool(written(file, BY_HAND))
    assert found.architecture_of("detector-12") == "detector"
    for name in ("other", "type-x"):
        text = BY_HAND.replace('"detector-*"', '"detector-*", "type-x"')
        with pytest.raises(ConfigError, match=f"'{name}' is of (0|2) architectures.*components"):
            read_component_pool(written(file, text)).architecture_of(name)


def test_the_how_to_pages_file_can_be_read_and_its_policies_are_the_defaults(file: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "component-pools.md"
    text = page.read_text(encoding="utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    assert read_component_pool(written(file, example)).architecture_of("detector-3") == "detector"
    defaults = (Policies().assign, Policies().evict, Policies().evict_host)
    documented = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    assert {policy.__name__ for policy in defaults} <= set(documented)
