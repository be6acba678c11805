"""docs/api.md tells of every route, error and setting."""

from dataclasses import fields
from pathlib import Path

import pytest

from shell_router.api.app import ROUTES
from shell_router.api.chat_body import INERT, REFUSED
from shell_router.api.problems import INTERNAL, PROBLEMS, REJECTED_BY_ENGINE
from shell_router.api.sampling import FLAGS, GRAMMARS, INTEGERS, NUMBERS
from shell_router.api.settings import ApiSettings

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
CODES = sorted({problem.code for problem in (*PROBLEMS.values(), REJECTED_BY_ENGINE, INTERNAL)})


@pytest.mark.parametrize("route", [f"{route.method} {route.path}" for route in ROUTES])
def test_every_route_is_documented(route: str) -> None:
    assert f"## `{route}`" in PAGE


@pytest.mark.parametrize("code", CODES)
def test_every_error_code_is_documented(code: str) -> None:
    assert f"| `{code}` |" in PAGE


@pytest.mark.parametrize("setting", [setting.name for setting in fields(ApiSettings)])
def test_every_limit_is_documented(setting: str) -> None:
    assert f"`{setting}`" in PAGE


@pytest.mark.parametrize("name", [*INERT, *REFUSED, *NUMBERS, *INTEGERS, *FLAGS, *GRAMMARS])
def test_every_chat_field_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE
