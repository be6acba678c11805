"""What users can set or see is documented; the README's commands exist."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from shell_router.cli import parser
from shell_router.config import Config, load_config
from shell_router.config.expert_pool import ExpertPoolFile, read_expert_pool
from shell_router.config.pool import Pool, load_pool
from shell_router.expert_pools import POLICIES as POOL_POLICIES
from shell_router.expert_pools import Costs, Policies
from shell_router.expert_pools.assigning import ASSIGNMENTS
from shell_router.expert_pools.evicting import EVICTIONS
from shell_router.scheduling.engine_selection import POLICIES
from shell_router.scheduling.queue_order import ORDERS
from shell_router.scheduling.scoring import SCORERS
from shell_router.scheduling.settings import SchedulingSettings
from shell_router.simulation.load import load
from shell_router.simulation.settings import Length, Profiles, Simulation, load_profiles
from shell_router.topology import parse_topology

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}


def _settings(kind: Any, path: str) -> Iterator[str]:
    """Dotted names of every setting of a dataclass, those of its sections included."""
    for name, hint in get_type_hints(kind).items():
        yield from _of_hint(hint, f"{path}.{name}".lstrip("."))


def _of_hint(hint: Any, path: str) -> Iterator[str]:
    sections = [part for part in _parts(hint) if is_dataclass(part)]
    if not sections:
        yield path
    for section in sections:
        yield from _settings(section, path)


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _as_documented(setting: str) -> str:
    named = re.sub(r"^models\.", "models.<alias>.", setting).replace(".pairs.", ".pairs[].")
    return re.sub(r"^api_keys\.", "api_keys.<tenant>.", named)


@pytest.mark.parametrize("setting", sorted(set(_settings(Config, ""))))
def test_every_setting_is_documented(setting: str) -> None:
    assert f"`{_as_documented(setting)}`" in PAGES["configuration.md"]


def test_no_setting_is_documented_that_does_not_exist() -> None:
    known = {_as_documented(setting) for setting in _settings(Config, "")}
    sections = {setting.rpartition(".")[0].removesuffix("[]") for setting in known} | set(get_type_hints(Config))
    assert set(re.findall(r"^\| `([^` ]+)` \|", PAGES["configuration.md"], re.MULTILINE)) <= known | sections


def _pool_settings(kind: Any, path: str, told: set[Any]) -> Iterator[str]:
    """Dotted names of a pool's settings; what is in `told`, and what stands twice, is told of as a whole."""
    for name, hint in get_type_hints(kind).items():
        here = f"{path}.{name}".lstrip(".")
        sections = [part for part in _parts(hint) if is_dataclass(part) and part not in told]
        told.update(sections)
        for section in sections:
            yield from _pool_settings(section, here, told)
        if not sections:
            yield here


def _sections(kind: Any) -> Iterator[Any]:
    """The dataclasses that a dataclass holds, at any depth."""
    for section in (part for hint in get_type_hints(kind).values() for part in _parts(hint) if is_dataclass(part)):
        yield section
        yield from _sections(section)


@pytest.mark.parametrize("name", [*POLICIES, *ORDERS])
def test_every_policy_and_order_has_its_section(name: str) -> None:
    assert f"\n### `{name}`\n" in PAGES["policies.md"]


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_is_explained(name: str) -> None:
    assert f"| `{name}` |" in PAGES["policies.md"]


POOL_SETTINGS = list(_pool_settings(Pool, "", set(_sections(Config))))


@pytest.mark.parametrize("setting", POOL_SETTINGS)
def test_every_setting_of_a_pool_is_documented(setting: str) -> None:
    section, _, name = setting.rpartition(".")
    row = re.search(rf"^\| `{section}` \|.*`{name}`", PAGES["pools.md"], re.MULTILINE) if section else None
    assert f"`{setting}`" in PAGES["pools.md"] or row


def test_no_setting_of_a_pool_is_documented_that_does_not_exist() -> None:
    table = PAGES["pools.md"].split("| Setting |")[1].split("\n\n")[0]
    documented = {
        name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall("`(.+?)`", row)
    }
    assert documented <= {*POOL_SETTINGS, *get_type_hints(Pool)}
    assert "aggregate.tau" in documented


SCHEDULING = {SchedulingSettings, *_sections(SchedulingSettings)}
"""Explained on a page of its own, and setting by setting among a deployment's."""
SIMULATION_SETTINGS = list(_pool_settings(Simulation, "", {Length, *SCHEDULING}))
PROFILE_SETTINGS = sorted({name.rpartition(".")[2] for name in _pool_settings(Profiles, "", set())})


@pytest.mark.parametrize("setting", SIMULATION_SETTINGS)
def test_every_setting_of_a_simulation_is_documented(setting: str) -> None:
    section, _, name = setting.rpartition(".")
    row = re.search(rf"^\| `{section}` \|.*`{name}`", PAGES["simulation.md"], re.MULTILINE) if section else None
    assert f"`{setting}`" in PAGES["simulation.md"] or row


@pytest.mark.parametrize("setting", PROFILE_SETTINGS)
def test_every_figure_of_a_profile_is_documented(setting: str) -> None:
    assert re.search(rf"\b{setting}\b", PAGES["simulation.md"].split("## What engines cost")[1])


def test_the_example_of_a_simulation_is_a_right_one(tmp_path: Path) -> None:
    example = (
        _yaml_block("simulation.md").replace("../../", f"{ROOT}/").replace("../engines", f"{ROOT}/configs/engines")
    )
    file = tmp_path / "simulation.yaml"
    file.write_text(example, encoding="utf-8")
    assert list(load(file).topologies) == ["tree", "full"]


def test_the_examples_of_profiles_are_right_ones(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGES["simulation.md"], re.DOTALL)[1:]
    for block in blocks:
        file = tmp_path / "profiles.yaml"
        file.write_text(block, encoding="utf-8")
        found = load_profiles(file)
        assert found.models["qwen3-vl-8b"].costs(found.gpus).decode.step_s == pytest.approx(0.005, rel=0.1)
    assert len(blocks) == 2


OF_POOLS = [*ASSIGNMENTS, *EVICTIONS, *POOL_POLICIES, *get_type_hints(Policies), *get_type_hints(Costs)]


@pytest.mark.parametrize("name", OF_POOLS)
def test_every_policy_and_setting_of_an_expert_pool_is_documented(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGES["expert-pools.md"])


EXPERT_POOL = sorted(set(_pool_settings(ExpertPoolFile, "", {Costs})))


@pytest.mark.parametrize("setting", EXPERT_POOL)
def test_every_setting_of_an_expert_pools_file_is_documented(setting: str) -> None:
    section, _, name = setting.rpartition(".")
    row = re.search(rf"^\| `{section or name}` \|.*", PAGES["expert-pools.md"], re.MULTILINE)
    assert row and f"`{name}`" in row.group()


def test_the_example_of_an_expert_pool_is_a_right_one(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(_yaml_block("expert-pools.md"), encoding="utf-8")
    assert read_expert_pool(file).architecture_of("detector-3") == "detector"


def _options(top: argparse.ArgumentParser) -> Iterator[str]:
    for action in top._actions:
        yield from (option for option in action.option_strings if option.startswith("--") and option != "--help")
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield name
                yield from _options(command)


@pytest.mark.parametrize("option", sorted(set(_options(parser()))))
def test_every_command_and_option_is_documented(option: str) -> None:
    assert any(f"{option}" in page for page in PAGES.values())


def test_every_link_between_pages_leads_somewhere() -> None:
    for name, text in PAGES.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (folder / target).exists(), f"{name} links to {target}"


def test_the_two_commands_of_the_readme_stand_on_lines_of_their_own() -> None:
    commands = re.findall(
        r"^pip install -c configs/cpu-constraints\.txt -e '\.\[\w+\]' && (.+)$", PAGES["README.md"], re.M
    )
    assert commands == ["shell-router demo", "python -m pytest"]


def _yaml_block(page: str) -> str:
    """The first YAML example of a page."""
    found = re.search(r"```yaml\n(.*?)```", PAGES[page], re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_readmes_topology_is_a_right_one() -> None:
    assert len(parse_topology(_yaml_block("README.md"), source="README.md").agents) == 13


def test_the_example_of_a_configuration_is_a_right_one(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(_yaml_block("configuration.md"), encoding="utf-8")
    assert load_config(file, {}).cache.backend == "redis"


def test_the_example_of_a_pool_is_a_right_one(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(_yaml_block("pools.md"), encoding="utf-8")
    assert load_pool(file).expert_names == ("small", "medium", "large")
