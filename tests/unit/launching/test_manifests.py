"""The Kubernetes manifests: they parse, and their names and ports fit each other. No cluster is asked."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from yarl import URL

from shell_router.app import load_config
from shell_router.config import ApiKey, Config
from shell_router.config.models import FromEnvironment
from shell_router.topology import load_topology

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "launch" / "kubernetes"
OBJECTS = [
    found for file in sorted(FOLDER.glob("*.yaml")) for found in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]


def of_kind(kind: str) -> dict[str, Any]:
    return {found["metadata"]["name"]: found for found in OBJECTS if found["kind"] == kind}


DEPLOYMENTS, SERVICES = of_kind("Deployment"), of_kind("Service")


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def flags(name: str) -> dict[str, str]:
    return dict(flag.removeprefix("--").split("=") for flag in container(DEPLOYMENTS[name])["args"] if "=" in flag)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """What the router's pod reads."""
    for name, text in of_kind("ConfigMap")["shell-router"]["data"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    given = {one["name"]: one["name"] for one in container(DEPLOYMENTS["shell-router"])["env"]}
    return load_config(tmp_path / "router.yaml", given)


def test_no_two_objects_of_a_kind_share_a_name() -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in OBJECTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_a_deployment_selects_its_own_pods_and_no_others(name: str) -> None:
    selector = DEPLOYMENTS[name]["spec"]["selector"]["matchLabels"]
    assert selector == DEPLOYMENTS[name]["spec"]["template"]["metadata"]["labels"]
    others = [one["spec"]["selector"]["matchLabels"] for other, one in DEPLOYMENTS.items() if other != name]
    assert selector not in others


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_leads_to_its_deployments_ports(name: str) -> None:
    pods = DEPLOYMENTS[name]
    assert SERVICES[name]["spec"]["selector"].items() <= pods["spec"]["template"]["metadata"]["labels"].items()
    listening = {port["name"]: port["containerPort"] for port in container(pods)["ports"]}
    for port in SERVICES[name]["spec"]["ports"]:
        assert listening[port["targetPort"]] == port["port"]


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_probes_and_mounts_name_what_is_there(name: str) -> None:
    pod = DEPLOYMENTS[name]["spec"]["template"]["spec"]
    ports = {port["name"] for port in container(DEPLOYMENTS[name])["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container(DEPLOYMENTS[name]).get(probe, {})
        assert {asked[way]["port"] for way in ("httpGet", "tcpSocket") if way in asked} <= ports
    mounted = {mount["name"] for mount in container(DEPLOYMENTS[name]).get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in pod.get("volumes", [])}


def test_the_router_finds_each_engine_under_its_service_in_its_role(config: Config) -> None:
    for model in config.models.values():
        (pair,) = model.pairs
        for role in ("prefill", "decode"):
            url = URL(getattr(pair, role))
            assert {port["port"] for port in SERVICES[url.host]["spec"]["ports"]} >= {url.port}
            assert flags(url.host)["disaggregation-mode"] == role
            assert flags(url.host)["port"] == str(url.port)
            assert flags(url.host)["model-path"] == str(model.path)
        assert flags(URL(pair.prefill).host)["disaggregation-bootstrap-port"] == str(pair.bootstrap_port)


def test_the_router_finds_redis_and_its_topology(config: Config) -> None:
    url = URL(config.cache.url)
    assert url.port in {port["port"] for port in SERVICES[url.host]["spec"]["ports"]}
    assert load_topology(config.topologies[0], models=config.models).name == "panel"


def test_the_router_has_time_to_leave_and_to_drain(config: Config) -> None:
    pod = DEPLOYMENTS["shell-router"]["spec"]["template"]["spec"]
    word, seconds = container(DEPLOYMENTS["shell-router"])["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep" and config.limits.lame_duck_s > 0
    left_s = pod["terminationGracePeriodSeconds"] - int(seconds)
    assert left_s > config.limits.lame_duck_s + config.limits.drain_s


def test_redis_asks_for_the_password_that_the_router_sends(config: Config) -> None:
    assert config.cache.password == FromEnvironment("REDIS_PASSWORD")
    secrets = [
        one["valueFrom"]["secretKeyRef"]
        for name in ("shell-router", "shell-router-redis")
        for one in container(DEPLOYMENTS[name])["env"]
        if one["name"] == "REDIS_PASSWORD"
    ]
    assert len(secrets) == 2 and secrets[0] == secrets[1]
    assert '--requirepass "$REDIS_PASSWORD"' in container(DEPLOYMENTS["shell-router-redis"])["args"][0]


def test_only_the_operators_key_is_one(config: Config) -> None:
    assert {name for name, key in config.api_keys.items() if isinstance(key, ApiKey) and key.operator} == {"operator"}


@pytest.mark.parametrize("name", ["shell-router", "shell-router-redis"])
def test_what_needs_no_gpu_runs_without_root_and_changes_nothing_of_its_image(name: str) -> None:
    assert DEPLOYMENTS[name]["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
    own = container(DEPLOYMENTS[name])["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_every_pod_says_what_it_needs(name: str) -> None:
    assert {"cpu", "memory"} <= container(DEPLOYMENTS[name])["resources"]["requests"].keys()


@pytest.mark.parametrize("name", sorted(set(DEPLOYMENTS) - {"shell-router"}))
def test_only_what_must_reaches_engines_and_redis(name: str) -> None:
    labels = DEPLOYMENTS[name]["spec"]["template"]["metadata"]["labels"]
    (policy,) = [
        one
        for one in of_kind("NetworkPolicy").values()
        if one["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]
    sources = [peer["podSelector"]["matchLabels"]["app"] for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert set(sources) <= {"shell-router", labels["app"]} and "shell-router" in sources


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
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    pod = DEPLOYMENTS["shell-router"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == int(user) > 0
