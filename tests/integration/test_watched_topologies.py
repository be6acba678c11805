"""Topology files that change while the router runs."""

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shell_router.api.live import LiveTopologies
from shell_router.app.topologies import live_topologies, watch_topologies
from shell_router.config import Config, ModelSettings
from shell_router.telemetry import Metrics
from shell_router.topology import LiveSettings
from tests.fakes.api_server import until

MODELS = {"small": ModelSettings(Path("small"))}


def write(folder: Path, name: str, model: str = "small", description: str = "") -> Path:
    file, new = folder / f"{name}.yaml", folder / f"{name}.new"
    new.write_text(
        f"description: '{description}'\nagents: {{a: {{model: {model}}}}}\n", encoding="utf-8"
    )
    return new.replace(file)  # or half of it might be read


class Watched:
    def __init__(self, topologies: LiveTopologies, metrics: Metrics) -> None:
        self.topologies = topologies
        self._metrics = metrics

    def reloads(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return (
            self._metrics.registry.get_sample_value("shell_router_topology_reloads_total", labels)
            or 0.0
        )

    def descriptions(self) -> dict[str, str]:
        return {name: graph.description for name, graph in self.topologies.items()}


@asynccontextmanager
async def watching(*paths: Path, watch: bool = True) -> AsyncIterator[Watched]:
    config, metrics = (
        Config(MODELS, topologies=paths, live_topologies=LiveSettings(watch=watch)),
        Metrics(),
    )
    topologies, seen = live_topologies(config)
    async with watch_topologies(config, topologies, seen, metrics, look_s=0.2):
        yield Watched(topologies, metrics)


async def test_files_that_are_added_changed_and_removed_take_effect(tmp_path: Path) -> None:
    folder = tmp_path / "topologies"
    folder.mkdir()
    write(folder, "one")
    (folder / "steps.yaml").write_text("start: s\nsteps: {s: {topology: one}}\n", encoding="utf-8")
    alone = write(tmp_path, "alone")
    async with watching(folder, alone) as running:
        assert set(running.topologies) == {"one", "steps", "alone"}
        kept = running.topologies["one"]
        write(folder, "two")
        await until(lambda: "two" in running.topologies)
        write(folder, "one", description="changed")
        await until(lambda: running.descriptions()["one"] == "changed")
        assert kept.description == ""
        alone.with_name("new").write_text(
            alone.read_text(encoding="utf-8").replace("''", "replaced"), encoding="utf-8"
        )
        alone.with_name("new").replace(alone)  # as editors save
        await until(lambda: running.descriptions()["alone"] == "replaced")
        (folder / "two.yaml").unlink()
        await until(lambda: "two" not in running.topologies)
        assert running.reloads("invalid") == 0


async def test_of_a_file_that_is_wrong_the_version_before_stays_and_others_take_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = write(tmp_path, "one")
    async with watching(tmp_path) as running:
        one.write_text("agents: {a: {model: absent}}\n", encoding="utf-8")
        await until(lambda: running.reloads("invalid") >= 1)
        assert f"{one}:1: Unknown model 'absent'" in caplog.text
        write(tmp_path, "two")
        await until(lambda: "two" in running.topologies)
        assert running.topologies["one"].agents["a"].model == "small"
        one.write_text("agents: {", encoding="utf-8")  # not even YAML
        before = running.reloads("invalid")
        await until(lambda: running.reloads("invalid") > before)
        assert set(running.topologies) == {"one", "two"}
        await running.topologies.reload(lambda: [])
        assert not running.topologies


async def test_a_file_takes_no_name_that_a_client_has_put(tmp_path: Path) -> None:
    config = Config(MODELS, topologies=(tmp_path,), live_topologies=LiveSettings(api=True))
    topologies, _ = live_topologies(config)
    await topologies.put("one", {"description": "put", "agents": {"a": {"model": "small"}}})
    write(tmp_path, "one")
    (error,) = await topologies.reload(lambda: sorted(tmp_path.glob("*.yaml")))
    assert "The name 'one' is already that of a topology that was put" in str(error)
    assert topologies["one"].description == "put"


async def test_a_folder_that_is_a_link_is_followed_when_it_leads_elsewhere(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: files link to ..data/<file>, and ..data is exchanged as a
    whole.
    """
    mount = tmp_path / "mount"
    for number in ("1", "2", "3"):
        (mount / f"..{number}").mkdir(parents=True)
        write(mount / f"..{number}", "one", description=number)
    (mount / "..data").symlink_to("..1")
    (mount / "one.yaml").symlink_to("..data/one.yaml")
    (tmp_path / "linked").symlink_to(mount)
    async with watching(tmp_path / "linked") as running:
        for number in ("2", "3"):
            (mount / "..tmp").symlink_to(f"..{number}")
            os.replace(mount / "..tmp", mount / "..data")  # noqa: PTH105 # Path.replace follows no link either
            await until(lambda number=number: running.descriptions() == {"one": number})


async def test_nothing_is_watched_where_the_deployment_says_so(tmp_path: Path) -> None:
    write(tmp_path, "one")
    async with watching(tmp_path, watch=False) as running:
        write(tmp_path, "two")
        assert await running.topologies.reload(lambda: sorted(tmp_path.glob("*.yaml"))) == []
        assert set(running.topologies) == {"one", "two"}


class UnsteadyFolder(type(Path())):  # type: ignore[misc]
    """A folder on a share that is not there for a while."""

    is_away = False

    def is_dir(self) -> bool:
        self._require_there()
        return bool(super().is_dir())

    def exists(self) -> bool:
        self._require_there()
        return bool(super().exists())

    def _require_there(self) -> None:
        if UnsteadyFolder.is_away:
            raise OSError(errno.EIO, "Input/output error")


async def test_a_folder_that_cannot_be_read_for_a_while_is_watched_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "one")
    async with watching(UnsteadyFolder(tmp_path)) as running:
        UnsteadyFolder.is_away = True
        try:
            await until(lambda: "Input/output error" in caplog.text)
        finally:
            UnsteadyFolder.is_away = False
        assert set(running.topologies) == {"one"}
        write(tmp_path, "two")
        await until(lambda: "two" in running.topologies)
