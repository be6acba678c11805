"""The table of headers that name sessions."""

import re
from itertools import chain
from pathlib import Path

import pytest

from shell_router.api.sessions import SESSION_HEADERS, digest, read_session
from shell_router.core.engine import Session

CLAUDE = "x-claude-code-session-id"
AGENT = "x-claude-code-agent-id"
PARENT = "x-claude-code-parent-agent-id"


@pytest.mark.parametrize("header", [root for root, _, _ in SESSION_HEADERS])
def test_each_header_names_a_session(header: str) -> None:
    assert read_session({header: "chat-7"}) == Session("chat-7", "", "chat-7")


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        (
            {"x-dynamo-session-id": "b", "x-dynamo-parent-session-id": "a"},
            Session("b", "a", "a"),
        ),
        ({"x-session-affinity": "b", "x-parent-session-id": "a"}, Session("b", "a", "a")),
        ({"x-session-id": "b", "x-parent-session-id": "a"}, Session("b", "a", "a")),
        ({CLAUDE: "s", AGENT: "b"}, Session("b", "s", "s")),
        ({CLAUDE: "s", AGENT: "c", PARENT: "b"}, Session("c", "b", "s")),
        ({"session-id": "s", "thread-id": "s"}, Session("s", "", "s")),
        (
            {"session-id": "s", "thread-id": "b", "x-codex-parent-thread-id": "s"},
            Session("b", "s", "s"),
        ),
    ],
)
def test_a_child_names_its_parent_and_shares_its_prefix(
    headers: dict[str, str], session: Session
) -> None:
    assert read_session(headers) == session


def test_the_first_row_that_is_sent_counts_with_its_own_parent() -> None:
    sent = {root: str(row) for row, (root, _, _) in enumerate(SESSION_HEADERS)}
    for row, (root, _, _) in enumerate(SESSION_HEADERS):
        assert read_session(sent) == Session(str(row), "", str(row))
        del sent[root]
    assert read_session({CLAUDE: "", "x-session-id": "a", AGENT: "b"}) == Session("a", "", "a")


@pytest.mark.parametrize("headers", [{}, {"x-session-id": ""}, {AGENT: "b", PARENT: "a"}])
def test_without_a_session_there_is_none(headers: dict[str, str]) -> None:
    assert read_session(headers) is None


@pytest.mark.parametrize("odd", ["a" * 129, "a b", "ä", "\udcff", "a\n", "<script>", "a/../b"])
def test_a_value_unfit_for_logs_becomes_a_digest(odd: str) -> None:
    session = read_session({CLAUDE: odd, AGENT: odd + "1", PARENT: odd + "2"})
    assert session == Session(digest(odd + "1"), digest(odd + "2"), digest(odd))
    assert all(len(name) == 32 and name.isalnum() for name in (session.id, session.parent))


def test_the_documented_table_is_this_one_in_its_order() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/api.md").read_text()
    section = page.partition("### Sessions")[2].partition("The first row")[0]
    documented = re.findall(r"`([a-z-]+)`", section)
    assert documented == [header for header in chain(*SESSION_HEADERS) if header]
