"""What users can set or see is documented; examples on the pages are right; links lead
somewhere."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from docs.generate import stale_pages
from shell_router.api.fields import CHAT, NOT_SERVED
from shell_router.app import load_config
from shell_router.batch.pool import load_pool
from shell_router.lab.simulation.settings import load, load_profiles
from shell_router.routing.engine_selection import POLICIES, SCORERS
from shell_router.routing.queue import ORDERS
from shell_router.topology import parse_topology

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")
}
PAGES |= {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")
}
SCHEDULING = PAGES["docs/explanation/scheduling.md"]


def test_generated_parts_are_current_and_every_setting_route_error_event_and_metric_has_a_meaning() -> (
    None
):
    assert not stale_pages(write=False), (
        "run `python docs/generate.py`, and say what is new on the page"
    )


def test_every_policy_order_and_scorer_is_explained() -> None:
    assert {*POLICIES, *ORDERS} <= set(re.findall(r"^### `(\w+)`$", SCHEDULING, re.MULTILINE))
    assert set(SCORERS) <= set(re.findall(r"^\| `(\w+)` \|", SCHEDULING, re.MULTILINE))


def test_every_field_of_a_chat_completion_is_documented() -> None:
    named = set(re.findall(r"`(\w+)`", PAGES["docs/reference/api.md"]))
    assert {*CHAT.names, *NOT_SERVED} <= named


def test_every_link_leads_somewhere() -> None:
    for name, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


def test_pages_that_the_code_names_exist() -> None:
    texts = [
        *(ROOT / "shell_router").rglob("*.py"),
        *(ROOT / "configs").rglob("*.yaml"),
        ROOT / "models" / "README.md",
    ]
    for file in texts:
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
            assert page in PAGES, f"{file.relative_to(ROOT)} names {page}"


def test_imports_on_the_pages_work() -> None:
    for name, text in PAGES.items():
        blocks = [ast.parse(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
        for one in (
            node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)
        ):
            if str(one.module).startswith(("shell_router", "agent_cache")):
                module = import_module(str(one.module))
                assert not [alias.name for alias in one.names if not hasattr(module, alias.name)], (
                    name
                )


def test_every_page_is_part_of_the_site() -> None:
    site = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    assert {f"docs/{page}" for page in site} == {name for name in PAGES if name.startswith("docs/")}


def test_the_two_commands_of_the_readme_stand_on_lines_of_their_own() -> None:
    commands = re.findall(
        r"^pip install -c configs/cpu-constraints\.txt -e '\.\[\w+\]' && (.+)$",
        PAGES["README.md"],
        re.M,
    )
    assert commands == ["shell-router demo", "python -m pytest"]


def test_the_words_that_the_prose_rules_forbid_occur_neither_in_pages_nor_in_code() -> None:
    words = r"\b(whoever|nobody|somebody|everybody|told|so many|passed on|by lot)\b"
    by_hand = {
        name: re.sub(r"<!-- generated: .*?<!-- end -->", "", text, flags=re.S)
        for name, text in PAGES.items()
    }
    files = (
        path
        for folder in ("shell_router", "agent_cache", "launch")
        for path in (ROOT / folder).rglob("*")
    )
    code = {
        str(path): path.read_text("utf-8")
        for path in files
        if path.suffix in (".py", ".html", ".yaml", ".sh")
    }
    found = [
        f"{name}: {word}"
        for name, text in (by_hand | code).items()
        for word in re.findall(words, text, re.I)
    ]
    assert not found


def _yaml_blocks(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", PAGES[page], re.DOTALL)


@pytest.mark.parametrize(
    ("page", "number", "agents"),
    [
        ("README.md", 0, 13),
        ("docs/tutorials/first-topology.md", 0, 4),
        ("docs/how-to/write-a-topology.md", 0, 13),
        ("docs/how-to/write-a-topology.md", 1, 13),
        ("docs/how-to/write-a-topology.md", 2, 4),
    ],
)
def test_the_examples_of_topologies_are_right_ones(page: str, number: int, agents: int) -> None:
    assert len(parse_topology(_yaml_blocks(page)[number], source=page).agents) == agents


def test_the_examples_of_files_are_right_ones(tmp_path: Path) -> None:
    file = tmp_path / "example.yaml"

    def written(page: str, number: int = 0) -> Path:
        text = (
            _yaml_blocks(page)[number]
            .replace("../../", f"{ROOT}/")
            .replace("../engines", f"{ROOT}/configs/engines")
        )
        file.write_text(text, encoding="utf-8")
        return file

    assert load_config(written("docs/reference/settings.md"), {}).cache.backend == "redis"
    assert load_pool(written("docs/how-to/batch-a-file.md")).aggregate is not None
    assert list(load(written("docs/how-to/evaluate.md")).topologies) == ["tree", "full"]
    for number in (0, 1):
        profiles = load_profiles(written("docs/reference/files.md", number))
        costs = profiles.models["qwen3-vl-8b"].costs(profiles.gpus)
        assert costs.decode.step_s == pytest.approx(0.005, rel=0.1)


def test_the_files_that_contributing_names_exist() -> None:
    named = re.findall(
        r"`((?:shell_router|tests|docs|topologies)/[\w/.-]*)`", PAGES["CONTRIBUTING.md"]
    )
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_commands_on_the_pages_exist_with_their_options() -> None:
    sections = re.split(r"^## shell-router ", PAGES["docs/reference/cli.md"], flags=re.MULTILINE)[
        1:
    ]
    options = {one.split("\n")[0]: {"--help", *re.findall(r"`(--[\w-]+)", one)} for one in sections}
    for name, text in PAGES.items():
        blocks = "\n".join(re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)).replace(
            "\\\n", " "
        )
        for line in re.findall(r"(?:^|&& )shell-router ([^\n#|>]+)", blocks, re.MULTILINE):
            command = next(
                (one for one in sorted(options, reverse=True) if line.startswith(one)), None
            )
            assert command, f"{name}: shell-router {line}"
            assert set(re.findall(r"(--[a-z][\w-]*)", line)) <= options[command], (
                f"{name}: shell-router {line}"
            )
