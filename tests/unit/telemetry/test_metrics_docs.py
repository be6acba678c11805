"""docs/metrics.md lists every metric."""

import re
from pathlib import Path

import pytest

from shell_router.telemetry import Metrics

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
FAMILIES = {family.name: family.type for family in Metrics().registry.collect()}
EXPORTED = {name + ("_total" if kind == "counter" else ""): kind for name, kind in FAMILIES.items()}


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_every_metric_is_documented_with_its_type(name: str) -> None:
    assert f"| `{name}` | {EXPORTED[name]} |" in PAGE


def test_no_metric_is_documented_that_does_not_exist() -> None:
    assert set(re.findall(r"^\| `(shell_router_\w+)`", PAGE, re.MULTILINE)) == set(EXPORTED)
