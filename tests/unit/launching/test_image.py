"""What an image is built from, as far as files say it. No image is built."""

import re
import tomllib
from pathlib import Path

import yaml

from shell_router import __version__

ROOT = Path(__file__).parents[3]
CHART = ROOT / "launch" / "helm"


def test_an_image_gets_all_that_the_wheel_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed.update(wheel["only-include"])
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert needed == let_in
    assert all((ROOT / one).exists() for one in needed)


def test_the_router_runs_as_the_user_of_its_image_who_is_not_root() -> None:
    dockerfile = (ROOT / "launch" / "Dockerfile").read_text(encoding="utf-8")
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    (in_chart,) = re.findall(
        r"runAsUser: (\d+)", (CHART / "templates" / "router.yaml").read_text(encoding="utf-8")
    )
    assert int(in_chart) == int(user) > 0


def test_an_image_has_the_tested_versions_and_tells_whether_the_router_answers() -> None:
    dockerfile = (ROOT / "launch" / "Dockerfile").read_text(encoding="utf-8")
    constraints = (ROOT / "configs" / "cpu-constraints.txt").read_text(encoding="utf-8")
    _, _, router = dockerfile.partition("AS router")
    installs = re.findall(r"pip install (.*)", router)
    assert len(re.findall(r"^torch==[\d.]+$", constraints, re.MULTILINE)) == 1
    assert installs and all("/cpu-constraints.txt" in command for command in installs)
    (port,) = re.findall(r"^EXPOSE (\d+)$", router, re.MULTILINE)
    (check,) = re.findall(r"^HEALTHCHECK .*", router, re.MULTILINE)
    assert f"127.0.0.1:{port}/health" in check


def test_the_chart_starts_images_of_this_version() -> None:
    chart, values = (
        yaml.safe_load((CHART / f"{name}.yaml").read_text("utf-8")) for name in ("Chart", "values")
    )
    assert chart["appVersion"] == __version__
    assert {values["images"][one].rpartition(":")[2] for one in ("router", "engine")} == {
        __version__
    }


def test_an_images_extras_are_those_of_the_package() -> None:
    dockerfile = (ROOT / "launch" / "Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r'"/shell-router\[([\w,]+)\]"', dockerfile)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
