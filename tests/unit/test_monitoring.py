"""The Grafana dashboard and the alert rules ask for metrics and labels that the router exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "monitoring"
ROW = re.compile(r"^\| `(shell_router_\w+)` \| ([\w, ]*) \|", re.MULTILINE)
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds itself."""


def exported() -> dict[str, set[str]]:
    """The labels of each series; test_docs.py holds the page to the code."""
    found: dict[str, set[str]] = {}
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    _, _, after = page.partition("Histograms: ")
    histograms = re.findall(r"`(\w+)`", after)
    for name, labels in ROW.findall(page):
        names = {one.strip() for one in labels.split(",") if one.strip()} | SCRAPED
        if name in histograms:
            found |= {
                f"{name}_sum": names,
                f"{name}_count": names,
                f"{name}_bucket": names | {"le"},
            }
        else:
            found[name] = names
    return found


SERIES = exported() | {"up": SCRAPED}  # Prometheus makes it


def faults(expression: str, shown: str) -> Iterator[str]:
    """What is wrong with an expression whose result's labels `shown` names."""
    names = re.findall(r"\bup\b|shell_router_\w+", expression)
    if not names:
        yield "it asks for no metric of the router"
    known = set[str]().union(*(SERIES.get(name, ()) for name in names))
    yield from (f"{name} is not exported" for name in names if name not in SERIES)
    for name, selector in re.findall(r"\b(up|shell_router_\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector):
            if label not in SERIES.get(name, ()):
                yield f"{name} has no label {label}"
    kept = [
        {one.strip() for one in by.split(",")} for by in re.findall(r"\bby \(([^)]*)\)", expression)
    ]
    grouped = set[str]().union(*kept)
    yield from (f"no metric of it has the label {label}" for label in grouped - known)
    if "histogram_quantile" in expression and not all("le" in by for by in kept):
        yield "a quantile needs the label le"
    result = (
        grouped - {"le"} if kept else set() if expression.startswith(("sum(", "absent(")) else known
    )
    yield from (
        f"its result has no label {label}" for label in set(re.findall(shown_label, shown)) - result
    )


shown_label = r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}"

DASHBOARD = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
VARIABLES = {one["name"] for one in DASHBOARD["templating"]["list"]}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_is_exported(panel: dict) -> None:  # type: ignore[type-arg]
    for target in panel["targets"]:
        assert not list(faults(target["expr"], target["legendFormat"])), target["expr"]
        assert set(re.findall(r"\$(?!__)(\w+)", target["expr"])) <= VARIABLES


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert all(x < 24 for x, _ in taken)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported_and_says_what_to_do(rule: dict) -> None:  # type: ignore[type-arg]
    assert not list(faults(rule["expr"], rule["annotations"]["summary"])), rule["expr"]
    assert rule["annotations"]["action"]
    assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize(
    ("expression", "shown", "fault"),
    [
        (
            "sum(rate(shell_router_nothing_total[5m]))",
            "",
            "shell_router_nothing_total is not exported",
        ),
        ("shell_router_run_seconds", "", "shell_router_run_seconds is not exported"),
        (
            'sum(shell_router_queue_requests{route="x"})',
            "",
            "shell_router_queue_requests has no label route",
        ),
        ("sum by (route) (shell_router_queue_requests)", "", "no metric of it has the label route"),
        (
            "sum by (model) (shell_router_queue_requests)",
            "{{role}}",
            "its result has no label role",
        ),
        ("down", "", "it asks for no metric of the router"),
    ],
)
def test_what_is_not_exported_is_found(expression: str, shown: str, fault: str) -> None:
    assert list(faults(expression, shown)) == [fault]
