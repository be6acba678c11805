"""The Kubernetes manifests: they parse, and their names and ports fit each other. No cluster is asked."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from yarl import URL

from shell_router.app import load_config
from shell_router.config import Config
from shell_router.topology import load_topology

FOLDER = Path(__file__).parents[3] / "launch" / "kubernetes"
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
    return load_config(tmp_path / "router.yaml", {"SHELL_ROUTER_KEY": "k"})


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


def test_the_router_has_time_to_drain(config: Config) -> None:
    grace_s = DEPLOYMENTS["shell-router"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.limits.drain_s
