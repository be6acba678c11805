"""What a deployment is refused for before anything of it is started."""

import socket
from pathlib import Path

import pytest

from shell_router.app.model_files import read_files
from shell_router.app.serving import bind_address
from shell_router.app.topologies import load_topologies
from shell_router.batch.pool import Pool, PoolModel, PoolWorker, RaySettings
from shell_router.config import (
    Config,
    EmbedderSettings,
    Listen,
    ModelSettings,
    PairLaunch,
    PairSettings,
)
from shell_router.errors import ConfigError
from shell_router.standins.embedded.settings import EmbeddedSection

MODELS = {"small": ModelSettings(Path("small"))}


def topology_file(folder: Path, name: str, early_exit: str = "off") -> Path:
    file = folder / "trees.yaml"
    text = (
        f"# a tree\nname: {name}\ntree: {{shape: [2, 1], models: [small]}}\nearly_exit: "
        f"{early_exit}\n"
    )
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_topology_with_the_name_of_a_model_is_refused_by_file_and_line(
    tmp_path: Path, as_folder: bool
) -> None:
    file = topology_file(tmp_path, "small")
    with pytest.raises(ConfigError) as refused:
        load_topologies(Config(MODELS, topologies=(tmp_path if as_folder else file,)))
    assert str(refused.value).startswith(
        f"{file}:2: The topology's name, 'small', is a model's too"
    )


def test_a_topology_path_that_leads_nowhere_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"topologies: there is no file or folder .*/absent\. Correct it"
    ):
        load_topologies(Config(MODELS, topologies=(tmp_path / "absent",)))


def test_an_early_exit_without_an_embedder_is_refused_by_setting(tmp_path: Path) -> None:
    file = topology_file(tmp_path, "tree", early_exit="on")
    with pytest.raises(
        ConfigError, match=r"embedder\.model is none, and the topology 'tree' exits early"
    ):
        load_topologies(Config(MODELS, topologies=(file,), embedder=EmbedderSettings("none")))


def test_steps_that_need_an_embedder_or_a_predictor_are_refused_without_it(tmp_path: Path) -> None:
    file = tmp_path / "steps.yaml"
    rules = {
        "has classifiers": "classifier: c, is: x",
        "asks for score_below": "score_below: {small: 0.5}",
    }
    for what, rule in rules.items():
        classifiers = "classifiers: {c: {examples: {x: [y]}}}\n" if "classifier" in rule else ""
        text = (
            f"start: [{{when: {{{rule}}}, go: a}}, {{go: a}}]\nsteps: {{a: {{model: "
            f"small}}}}\n{classifiers}"
        )
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=what):
            load_topologies(Config(MODELS, topologies=(file,), embedder=EmbedderSettings("none")))


def test_topologies_of_all_paths_are_known_to_steps_and_share_no_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    tree = topology_file(tmp_path / "sub", "tree")
    file = tmp_path / "steps.yaml"
    file.write_text("start: a\nsteps: {a: {topology: tree}}\n", encoding="utf-8")
    found = load_topologies(Config(MODELS, topologies=(file, tmp_path / "sub")))
    assert list(found) == ["steps", "tree"]
    file.write_text("name: tree\nstart: a\nsteps: {a: {model: small}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"The name 'tree' is already that of {tree}"):
        load_topologies(Config(MODELS, topologies=(tmp_path / "sub", file)))


def test_a_model_folder_that_does_not_exist_is_named_with_its_setting(tmp_path: Path) -> None:
    pair = PairSettings("http://127.0.0.1:1", "http://127.0.0.1:2")
    with pytest.raises(
        ConfigError, match=r"models\.small\.path: there is no folder .*/absent\. Name the folder"
    ):
        read_files({"small": ModelSettings(path=tmp_path / "absent", pairs=(pair,))})


@pytest.mark.parametrize(
    ("host", "remedy"),
    [("192.0.2.1", "Set listen.host to an address"), ("no such host", "Correct listen.host")],
)
def test_an_address_that_cannot_be_listened_on_is_refused_with_a_fitting_remedy(
    host: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy), bind_address(Listen(host, 0)):
        pass


def test_a_port_is_taken_before_the_server_listens_on_it() -> None:
    with bind_address(Listen("localhost", 0)) as sockets:
        ports = {one.getsockname()[1] for one in sockets}
        assert len(ports) == 1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", *ports))


def test_only_sglang_pairs_on_this_machine_load_a_pools_adapters() -> None:
    models = {"odd": PoolModel(Path("m"), adapter=Path("adapters/odd"))}
    pair = PoolWorker(pair=PairSettings("http://p:1", "http://d:1", launch=PairLaunch()))
    assert Pool(models, (pair,)).models["odd"].adapter
    with pytest.raises(ConfigError, match="model 'odd' has an adapter, which embedded workers"):
        Pool(models, (pair, PoolWorker(embedded=EmbeddedSection())))
    with pytest.raises(ConfigError, match="model 'odd' has an adapter"):
        Pool(models, (pair,), ray=RaySettings("auto"))
