"""JSON Schemas of YAML files: what they accept is what is read, and they complete what can be
written.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from shell_router.app.wings import kind_settings
from shell_router.cli import main
from shell_router.config import deployment_schema

ROOT = Path(__file__).parents[3]
KINDS = ("topology", "deployment", "batch-pool", "simulation")


def _schema() -> dict[str, Any]:
    return deployment_schema(kind_settings())


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_the_shipped_deployments_fit_the_schema(file: Path) -> None:
    Draft202012Validator(_schema()).validate(yaml.safe_load(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"models": {}, "modles": {}},
        {"models": {"a": {"embedded": {"threads": 0}}}},
        {"models": {}, "limits": {"drain_s": "long"}},
        {"models": {}, "cache": {"backend": "disk"}},
    ],
)
def test_what_is_refused_does_not_fit_the_schema(wrong: dict[str, Any]) -> None:
    assert list(Draft202012Validator(_schema()).iter_errors(wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_has_a_schema(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", kind]) == 0
    Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))
