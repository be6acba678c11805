"""The Helm chart, rendered by Helm's own code and held to Kubernetes' schemas; its names and ports
fit each other.

No cluster is asked. Helm comes from `helm-python-sdk`, in an environment that is kept in the user's
cache folder: its 250 MB are for these tests alone.
"""

import fcntl
import json
import os
import subprocess
import venv
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from shell_router.app import load_config
from shell_router.config import ApiKey, Config
from shell_router.config.models import FromEnvironment
from shell_router.topology import load_topology

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHART = ROOT / "launch" / "helm"
PACKAGES = ("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shell-router"
TWO_MODELS = {
    "router": {
        "replicas": 3,
        "config": {"limits": {"lame_duck_s": 9, "drain_s": 90}, "auto": {"models": ["small"]}},
    },
    "models": {
        "small": {"path": "/models/Qwen3-4B", "pairs": 2, "gpus": 2, "flags": ["--tp=2"]},
        "large": {
            "path": "/models/Qwen3-32B",
            "pairs": [{"prefill": "http://p:1", "decode": "http://d:2"}],
        },
    },
    "topologies": {
        "one": {"tree": {"shape": [3, 1], "models": ["small", "large"]}},
        "two": {"agents": {"a": {"model": "large"}}},
    },
    "engineEnv": [{"name": "MC_FORCE_TCP", "value": "1"}],
    "redis": {"url": "redis://elsewhere:6380/1"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"enabled": False},
}
SECRET_FILES = [
    {"name": "files", "secret": {"secretName": "files"}},
    {"name": "batches", "emptyDir": {}},
]
SEVERAL_TENANTS = {
    "router": {
        "replicas": 1,
        "config": {
            "listen": {
                "ui": True,
                "tls": {"certificate": "/files/router.pem", "key": "/files/router.key"},
            },
            "api_keys": {"bob": {"env": "BOB_KEY", "models": ["small"], "expires": "2027-12-31"}},
            "api_keys_file": "/files/keys.yaml",
            "cache": {"prefix": "moa", "ttl_s": 1000000000},
            "models": {
                "small": {
                    "reasoning_parser": "qwen3",
                    "tool_call_parser": "qwen",
                    "engine_key": {"env": "ENGINE_KEY"},
                }
            },
            "batches": {"folder": "/batches"},
        },
        "env": [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": "tenants", "key": name}}}
            for name in ("BOB_KEY", "ENGINE_KEY")
        ],
        "volumes": SECRET_FILES,
        "volumeMounts": [
            {"name": "files", "mountPath": "/files", "readOnly": True},
            {"name": "batches", "mountPath": "/batches"},
        ],
    },
    "serviceMonitor": {"enabled": True, "tlsConfig": {"serverName": "moa.example.org"}},
}


@cache
def python() -> Path:
    """Of the environment with Helm; built once, in a minute."""
    folder = CACHE / "chart-{}-{}".format(*(one.rpartition("=")[2] for one in PACKAGES))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, with_pip=True)
            subprocess.run(
                [folder / "bin" / "python", "-m", "pip", "install", "-q", *PACKAGES],
                check=True,
                env=own(),
            )
            (folder / "complete").touch()
    return folder / "bin" / "python"


def own() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    script = ROOT / "tests" / "fakes" / "render_chart.py"
    command = [python(), script, CHART, json.dumps(values)]
    found = subprocess.run(
        command, env=own(), capture_output=True, text=True, check=True, timeout=120
    )
    return dict(json.loads(found.stdout))


class Rendered:
    """The chart's objects with `values` over its own."""

    def __init__(self, values: dict[str, Any]) -> None:
        found = rendered(values)
        assert "error" not in found, found
        assert not [one for one in found["lint"] if one["severity"] not in ("INFO", 1, "info")], (
            found["lint"]
        )
        self.objects = found["objects"]

    def of_kind(self, kind: str) -> dict[str, Any]:
        return {found["metadata"]["name"]: found for found in self.objects if found["kind"] == kind}

    def config(self, folder: Path) -> Config:
        """What the router's pod reads."""
        for name, text in self.of_kind("ConfigMap")["moa"]["data"].items():
            (folder / name).write_text(text, encoding="utf-8")
        given = {
            one["name"]: one["name"] for one in container(self.of_kind("Deployment")["moa"])["env"]
        }
        return load_config(folder / "router.yaml", given)


@pytest.fixture(
    scope="module",
    params=[{}, TWO_MODELS, SEVERAL_TENANTS],
    ids=["as-shipped", "two-models", "several-tenants"],
)
def chart(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(request.param)


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def flags(deployment: dict[str, Any]) -> dict[str, str]:
    return dict(
        flag.removeprefix("--").split("=") for flag in container(deployment)["args"] if "=" in flag
    )


def test_no_two_objects_of_a_kind_share_a_name(chart: Rendered) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in chart.objects]
    assert len(names) == len(set(names))


def test_a_deployment_selects_its_own_pods_and_no_others(chart: Rendered) -> None:
    selectors = []
    for one in chart.of_kind("Deployment").values():
        selectors.append(one["spec"]["selector"]["matchLabels"])
        assert selectors[-1] == one["spec"]["template"]["metadata"]["labels"]
    assert all(selectors.count(one) == 1 for one in selectors)


def test_a_service_leads_to_its_deployments_ports(chart: Rendered) -> None:
    for name, service in chart.of_kind("Service").items():
        pods = chart.of_kind("Deployment")[name]
        assert (
            service["spec"]["selector"].items()
            <= pods["spec"]["template"]["metadata"]["labels"].items()
        )
        listening = {port["name"]: port["containerPort"] for port in container(pods)["ports"]}
        for port in service["spec"]["ports"]:
            assert listening[port["targetPort"]] == port["port"]


def test_probes_and_mounts_name_what_is_there(chart: Rendered) -> None:
    for one in chart.of_kind("Deployment").values():
        ports = {port["name"] for port in container(one)["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container(one).get(probe, {})
            assert {asked[way]["port"] for way in ("httpGet", "tcpSocket") if way in asked} <= ports
        mounted = {mount["name"] for mount in container(one).get("volumeMounts", [])}
        assert mounted == {
            volume["name"] for volume in one["spec"]["template"]["spec"].get("volumes", [])
        }
        assert {"cpu", "memory"} <= container(one)["resources"]["requests"].keys(), (
            "every pod says what it needs"
        )


def test_the_router_finds_each_engine_under_its_service_in_its_role(
    chart: Rendered, tmp_path: Path
) -> None:
    services, deployments = chart.of_kind("Service"), chart.of_kind("Deployment")
    started = 0
    for model in chart.config(tmp_path).models.values():
        for pair in model.pairs:
            for role in ("prefill", "decode"):
                url = URL(getattr(pair, role))
                if url.host in ("p", "d"):  # runs elsewhere
                    continue
                started += 1
                assert {port["port"] for port in services[url.host]["spec"]["ports"]} >= {url.port}
                found = flags(deployments[url.host])
                assert (found["disaggregation-mode"], found["port"]) == (role, str(url.port))
                assert found["model-path"] == str(model.path)
                if role == "prefill":
                    assert found["disaggregation-bootstrap-port"] == str(pair.bootstrap_port)
    engines = [one for one in deployments.values() if container(one)["name"] == "sglang"]
    assert started == len(engines) > 0


def test_the_router_finds_redis_and_its_topologies(chart: Rendered, tmp_path: Path) -> None:
    config = chart.config(tmp_path)
    url = URL(config.cache.url)
    if url.host != "elsewhere":
        assert url.port in {
            port["port"] for port in chart.of_kind("Service")[url.host]["spec"]["ports"]
        }
    assert [load_topology(file, models=config.models).name for file in config.topologies] == [
        file.stem for file in config.topologies
    ]


def test_the_router_has_time_to_leave_and_to_drain(chart: Rendered, tmp_path: Path) -> None:
    router, limits = chart.of_kind("Deployment")["moa"], chart.config(tmp_path).limits
    word, seconds = container(router)["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep" and limits.lame_duck_s > 0
    left_s = router["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] - int(seconds)
    assert left_s > limits.lame_duck_s + limits.drain_s


def test_keys_come_from_the_secret_and_only_the_operators_is_one(
    chart: Rendered, tmp_path: Path
) -> None:
    config = chart.config(tmp_path)
    assert config.cache.password == FromEnvironment("REDIS_PASSWORD")
    assert {
        name for name, key in config.api_keys.items() if isinstance(key, ApiKey) and key.operator
    } == {"operator"}
    secrets = [
        one["valueFrom"]["secretKeyRef"]
        for deployment in chart.of_kind("Deployment").values()
        for one in container(deployment).get("env", [])
        if one["name"] == "REDIS_PASSWORD"
    ]
    assert secrets and all(
        one == {"name": "shell-router", "key": "redis-password"} for one in secrets
    )


def test_settings_keys_and_files_of_several_tenants_reach_the_router(tmp_path: Path) -> None:
    chart = Rendered(SEVERAL_TENANTS)
    config, router = chart.config(tmp_path), chart.of_kind("Deployment")["moa"]
    assert config.api_keys["bob"] == ApiKey(key="BOB_KEY", models=("small",), expires="2027-12-31")
    assert config.api_keys.keys() == {"team", "operator", "bob"}
    assert (config.cache.backend, config.cache.prefix, config.cache.ttl_s) == ("redis", "moa", 1e9)
    small = config.models["small"]
    assert (small.reasoning_parser, small.tool_call_parser) == ("qwen3", "qwen") and len(
        small.pairs
    ) == 1
    assert small.engine_key == FromEnvironment("ENGINE_KEY")
    assert config.listen.ui and config.listen.tls is not None and config.batches.folder is not None
    mounted = {mount["mountPath"] for mount in container(router)["volumeMounts"]}
    files = (config.listen.tls.certificate, config.listen.tls.key, config.api_keys_file)
    assert {str(file.parent) for file in files if file} | {str(config.batches.folder)} <= mounted
    assert router["spec"]["template"]["spec"]["securityContext"]["fsGroup"] > 0, (
        "the volumes are the user's to write"
    )
    assert router["spec"]["strategy"] == {"type": "Recreate"}, (
        "one router at a time has the folder of batches"
    )


def test_kubernetes_and_prometheus_ask_over_https_where_the_router_has_a_certificate() -> None:
    for values, scheme in ((TWO_MODELS, "http"), (SEVERAL_TENANTS, "https")):
        chart = Rendered(values)
        router = container(chart.of_kind("Deployment")["moa"])
        probes = [router[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert {probe["httpGet"]["scheme"] for probe in probes} == {scheme.upper()}
        (endpoint,) = chart.of_kind("ServiceMonitor")["moa"]["spec"]["endpoints"]
        assert endpoint.get("scheme", "http") == scheme
    assert endpoint["tlsConfig"] == {"serverName": "moa.example.org"}


def test_what_needs_no_gpu_runs_without_root_and_changes_nothing_of_its_image(
    chart: Rendered,
) -> None:
    for one in chart.of_kind("Deployment").values():
        if container(one)["name"] == "sglang":
            continue
        assert one["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
        context = container(one)["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]


def test_a_drain_of_nodes_takes_one_router_at_a_time(chart: Rendered) -> None:
    (budget,) = chart.of_kind("PodDisruptionBudget").values()
    pods = chart.of_kind("Deployment")["moa"]["spec"]["template"]["metadata"]["labels"]
    assert (
        budget["spec"]["selector"]["matchLabels"] == pods and budget["spec"]["maxUnavailable"] == 1
    )


def test_only_what_must_reaches_engines_and_redis() -> None:
    shipped = Rendered({})
    for name, one in shipped.of_kind("Deployment").items():
        labels = one["spec"]["template"]["metadata"]["labels"]
        policies = [
            policy
            for policy in shipped.of_kind("NetworkPolicy").values()
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        if name == "moa":
            assert not policies
            continue
        (policy,) = policies
        sources = [
            peer["podSelector"]["matchLabels"]["app"]
            for rule in policy["spec"]["ingress"]
            for peer in rule["from"]
        ]
        assert set(sources) <= {"shell-router", labels["app"]} and "shell-router" in sources


def test_prometheus_finds_the_routers_with_the_operators_key() -> None:
    chart = Rendered(TWO_MODELS)
    (monitor,) = chart.of_kind("ServiceMonitor").values()
    service = chart.of_kind("Service")["moa"]
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"] == {
        "name": "shell-router",
        "key": "operator-key",
    }
    assert monitor["metadata"]["labels"] == {"release": "prometheus"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"replicas": 3}, "replicas"),
        ({"models": {"small": {"path": "/models/x", "pairs": 0}}}, "/models/small/pairs"),
        ({"models": {"Small_1": {"path": "/models/x", "pairs": 1}}}, "Small_1"),
        ({"router": {"config": {"listen": {"port": 9}}}}, "/router/config/listen/port"),
        ({"router": {"config": {"cache": {"url": "redis://r"}}}}, "/router/config/cache/url"),
        (
            {"router": {"config": {"models": {"small": {"pairs": []}}}}},
            "/router/config/models/small/pairs",
        ),
        ({"router": {"config": {"batches": {"folder": "/batches"}}}}, "set router.replicas to 1"),
    ],
)
def test_values_that_the_chart_does_not_take_are_refused_by_name(
    values: dict[str, Any], field: str
) -> None:
    assert field in rendered(values)["error"]
